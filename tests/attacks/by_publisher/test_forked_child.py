"""A graph has taken over a process that was forked from the agent's helper, and looks for what is not its own.

The attacker reads all memory of its process, its descriptors and its environment. It wants the agent's keys, or what
the processes before it, and beside it, computed on: other bundles, other examples. These tests look where it would,
from outside, in the real processes, once they have computed. First they find what is there, in the same way.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import generate_key
from archipel.lite_runtime.isolated.runtime import IsolatedRuntime, load_isolated
from archipel.lite_runtime.isolated.starter import Starter
from tests.attacks.sandbox_bundles import external, public, signed, upload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="child processes with limits need Linux")
_CHUNK = 1 << 24


def holds(pid: int | None, secret: bytes) -> bool:
    """Whether any mapping of the process has `secret`."""
    found = False
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights = line.split()[:2]
            if rights[0] != "r" or line.rstrip().endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
                continue
            at, end = (int(each, 16) for each in place.split("-"))
            # Chunks overlap, so that none splits the secret.
            for start in range(at, end, _CHUNK):
                memory.seek(start)
                try:
                    found = found or secret in memory.read(min(_CHUNK + len(secret), end - start))
                except OSError:
                    break  # a part of a file that has become shorter
    return found


def opened(pid: int | None) -> set[str]:
    """What its descriptors lead to, such as socket:[4711]."""
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # of this process: the one with which the folder is read
            links.add(os.readlink(path))
    return links


def special(links: set[str]) -> set[str]:
    return {link for link in links if link.startswith(("socket:", "pipe:"))}


@pytest.fixture
def starter() -> Iterator[Starter]:
    made = Starter(60.0)
    yield made
    made.close()


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Path, list[bytes]]:
    key = generate_key()
    return signed(tmp_path / "b", key, upload(external("t", "weights.safetensors"))), public(key)


def compute(runtime: IsolatedRuntime, example: bytes) -> None:
    """Let it compute on 4 MiB that consist of `example`; its process keeps them at least until the next request."""
    runtime.analyze(np.frombuffer(example * ((4 << 20) // len(example)), np.float32))


def example() -> bytes:
    """16 bytes that are four finite numbers, no two of which are the same anywhere else."""
    return np.random.default_rng(secrets.randbits(128)).uniform(1.0, 2.0, 4).astype(np.float32).tobytes()


@pytest.mark.sampled(every=4)
def test_nothing_of_the_agent(
    bundle: tuple[Path, list[bytes]], starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the agent's memory, in a variable, and behind a descriptor, before the helper starts.
    key, password = secrets.token_bytes(32), secrets.token_hex(16)
    monkeypatch.setenv("DATABASE_PASSWORD", password)
    (tmp_path / "device.key").write_bytes(key)
    with open(tmp_path / "device.key", "rb") as held, socket.socket() as connection, ExitStack() as stack:
        for descriptor in (held.fileno(), connection.fileno()):
            os.set_inheritable(descriptor, True)
        agents = special(opened(os.getpid()))
        assert agents
        runtime = stack.enter_context(load_isolated(*bundle, starter=starter))
        mine = example()
        compute(runtime, mine)
        assert holds(os.getpid(), key)
        assert holds(os.getpid(), password.encode())
        assert holds(runtime.pid, mine)
        for process in (runtime.pid, starter.pid):
            assert not holds(process, key), process
            assert not holds(process, password.encode()), process
            assert Path(f"/proc/{process}/environ").read_bytes() == b""
            assert str(tmp_path / "device.key") not in opened(process)
            assert not special(opened(process)) & agents
        # Its socket and the pipe that ends it, and neither the helper's socket nor the pipe that tells how it ended.
        kinds = sorted(link.partition(":")[0] for link in special(opened(runtime.pid)))
        assert kinds == ["pipe", "socket"]


@pytest.mark.sampled(every=4)
def test_nothing_of_another_child(bundle: tuple[Path, list[bytes]], starter: Starter, tmp_path: Path) -> None:
    """Of one that has ended, and of one that still runs: neither its examples, nor its bundle, nor a way to it."""
    gone, beside, mine = example(), example(), example()
    other = generate_key()
    folder = signed(tmp_path / "another-bundle", other, upload(external("t", "weights.safetensors")))
    with load_isolated(folder, public(other), starter=starter) as runtime:
        compute(runtime, gone)
        assert holds(runtime.pid, gone)
        assert holds(runtime.pid, b"another-bundle")
    with (
        load_isolated(folder, public(other), starter=starter) as first,
        load_isolated(*bundle, starter=starter) as second,
    ):
        compute(first, beside)
        compute(second, mine)
        assert holds(first.pid, beside)
        assert holds(second.pid, mine)
        for process in (second.pid, starter.pid):
            assert not holds(process, gone), process
            assert not holds(process, beside), process
            assert not holds(process, b"another-bundle"), process
        assert not holds(starter.pid, mine)
        assert not special(opened(first.pid)) & special(opened(second.pid))
        scratches = {os.readlink(f"/proc/{runtime.pid}/cwd") for runtime in (first, second)}
        assert len(scratches) == 2
        assert not holds(second.pid, os.readlink(f"/proc/{first.pid}/cwd").encode())
