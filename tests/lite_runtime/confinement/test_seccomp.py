"""The filter's numbers against the kernel's own tables, and the filter as a program, also for other processors."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from archipel.lite_runtime.confinement import seccomp

TABLES = {
    0: Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    1: Path("/usr/include/asm-generic/unistd.h"),
}
ALL = {
    **seccomp.REFUSED, **seccomp.OWN_PROCESS, **seccomp.ITSELF_BY_ZERO,
    "clone": seccomp.CLONE, "clone3": seccomp.CLONE3,
}  # fmt: skip
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


@pytest.mark.parametrize("column", TABLES)
def test_numbers(column: int) -> None:
    if not TABLES[column].exists():
        pytest.skip("the kernel's headers are not installed")
    text = TABLES[column].read_text()
    official = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    for name, numbers in ALL.items():
        if numbers[column] is not None or name in official:
            assert numbers[column] == official[name], name


def run(machine: str, architecture: int, number: int, argument: int = 0) -> int:
    """What classic BPF does with one system call: an interpreter after the kernel's filter documentation."""
    data = {0: number, 4: architecture, 16: argument & 0xFFFFFFFF}
    program, at, value = seccomp.filter_program(machine, pid=4242), 0, 0
    while True:
        code, yes, no, k = program[at]
        at += 1
        match code:
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                value = data[k]
            case 0x15:  # BPF_JMP | BPF_JEQ
                at += yes if value == k else no
            case 0x35:  # BPF_JMP | BPF_JGE
                at += yes if value >= k else no
            case 0x45:  # BPF_JMP | BPF_JSET
                at += yes if value & k else no
            case 0x06:  # BPF_RET
                return k


@pytest.mark.parametrize(("machine", "architecture", "column"), [("x86_64", X86, 0), ("aarch64", ARM, 1)])
def test_program(machine: str, architecture: int, column: int) -> None:
    for numbers in seccomp.REFUSED.values():
        if numbers[column] is not None:
            assert run(machine, architecture, numbers[column]) == EPERM
    other = {X86: ARM, ARM: X86}[architecture]
    assert run(machine, other, 0) == KILL
    assert run(machine, 0x40000003, 11) == KILL  # i386's execve
    read, write, recvmsg, sendmsg, mmap = ((0, 1, 47, 46, 9), (63, 64, 212, 211, 222))[column]
    assert {run(machine, architecture, n) for n in (read, write, recvmsg, sendmsg, mmap)} == {ALLOW}
    clone, kill, prlimit = (
        seccomp.CLONE[column],
        seccomp.OWN_PROCESS["kill"][column],
        seccomp.ITSELF_BY_ZERO["prlimit64"][column],
    )
    assert run(machine, architecture, clone, 0x003D0F00) == ALLOW  # pthread_create's flags
    assert run(machine, architecture, clone, 0x01200011) == EPERM  # fork's
    assert run(machine, architecture, 435) == ENOSYS
    assert run(machine, architecture, kill, 4242) == ALLOW
    assert run(machine, architecture, kill, 1) == EPERM
    assert run(machine, architecture, prlimit, 0) == ALLOW
    assert run(machine, architecture, prlimit, 1) == EPERM


def test_the_calls_of_the_32_bit_table_are_no_way_round() -> None:
    assert run("x86_64", X86, 0x40000000 + 41) == KILL
    assert run("x86_64", X86, 0xFFFFFFFF) == KILL
