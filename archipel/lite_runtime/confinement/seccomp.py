"""A seccomp filter: the kernel refuses system calls that running a graph never needs, for the whole process, for good.

It refuses what an attacker who took the process over would want next: sockets, other programs and processes, access to
other processes, and the parts of the kernel with the most known holes. It allows everything else: a list of the calls
that ONNX Runtime, Python and the drivers of delegates make would change with every version of them. Source: seccomp(2),
include/uapi/linux/{seccomp,audit,filter}.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

# Name: number on x86_64, number on aarch64 (None: none). From the kernel's tables; a test compares them.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "personality": (135, 92), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "uselib": (134, None),
}  # fmt: skip
OWN_PROCESS: dict[str, tuple[int, int]] = {"kill": (62, 129), "tgkill": (234, 131)}
"""Calls allowed if the first argument is the process's own id: C's abort() ends a process that way."""
ITSELF_BY_ZERO: dict[str, tuple[int, int]] = {"prlimit64": (302, 261)}
"""Calls allowed if the first argument is 0, which means the process itself."""
CLONE, CLONE3 = (56, 220), (435, 435)
_SECCOMP = (317, 277)

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column of the tables, and the number with which the kernel marks a call's architecture (audit.h)."""
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000

# Of classic BPF (filter.h): opcodes; offsets in struct seccomp_data; return values; arguments of prctl and seccomp.
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_PR_GET_SECCOMP, _PR_SET_SECCOMP, _MODE_FILTER = 21, 22, 2
_SET_MODE_FILTER, _ALL_THREADS = 1, 1

Instruction = tuple[int, int, int, int]
"""A step of classic BPF: opcode, steps to skip if the test holds, steps to skip if not, operand."""


class _Step(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(_Step))]


def seccomp_there() -> bool:
    """Whether this kernel takes filters, and the tables have a column for this processor."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES or sys.maxsize < 2**32:
        return False
    # Without seccomp in the kernel the first call fails. With filters, one at a null address fails with EFAULT.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) < 0:
        return False
    libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, None, 0, 0)
    return ctypes.get_errno() == errno.EFAULT


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """The filter for a processor of ARCHITECTURES and the process `pid`."""
    column, architecture = ARCHITECTURES[machine]
    refuse = [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    allow = [(_RETURN, 0, 0, _ALLOW)]
    kill = [(_RETURN, 0, 0, _KILL_PROCESS)]
    # First the architecture: numbers of system calls mean others in another one, such as 32-bit x86.
    steps: list[Instruction] = [(_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), *kill]
    steps.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        # Numbers with this bit are the same calls in the x32 ABI, which would get around the table.
        steps += [(_JUMP_AT_LEAST, 0, 1, _X32), *kill]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            steps += [(_JUMP_EQUAL, 0, 1, number), *refuse]
    # clone3 has its flags in memory, which a filter cannot read. After ENOSYS the C library uses clone instead.
    steps += [(_JUMP_EQUAL, 0, 1, CLONE3[column]), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    steps += _if_argument(CLONE[column], (_JUMP_BITS, 0, 1, _CLONE_THREAD), allow, refuse)
    for numbers in OWN_PROCESS.values():
        steps += _if_argument(numbers[column], (_JUMP_EQUAL, 0, 1, pid), allow, refuse)
    for numbers in ITSELF_BY_ZERO.values():
        steps += _if_argument(numbers[column], (_JUMP_EQUAL, 0, 1, 0), allow, refuse)
    return [*steps, *allow]


def _if_argument(
    number: int, test: Instruction, then: list[Instruction], otherwise: list[Instruction]
) -> list[Instruction]:
    # Only the low 32 bits are loaded: flags, process ids and 0 fit into them, and the kernel reads no more of them.
    body = [(_LOAD, 0, 0, _FIRST_ARGUMENT), test, *then, *otherwise]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def restrict_calls() -> bool:
    """Put the filter over all threads of this process. Needs no_new_privs. Returns False without seccomp.

    Raises OSError.
    """
    if not seccomp_there():
        return False
    machine = platform.machine()
    steps = filter_program(machine, os.getpid())
    array = (_Step * len(steps))(*(_Step(*step) for step in steps))
    program = _Program(len(steps), ctypes.cast(array, ctypes.POINTER(_Step)))
    libc = ctypes.CDLL(None, use_errno=True)
    number = _SECCOMP[ARCHITECTURES[machine][0]]
    if libc.syscall(number, _SET_MODE_FILTER, _ALL_THREADS, ctypes.byref(program)) == 0:
        return True
    # Kernels without that system call, or that refuse the flag, filter the calling thread and those it starts.
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"seccomp: {os.strerror(error)}")
    return True
