"""A graph has taken over the process that runs it, through a fault of ONNX Runtime that nobody knows yet.

The attacker's code is in the isolated child and has what the child has: the inspection of graphs is behind it. It wants
the device's key, other people's files, a connection to the outside, a program of its own. What stops it: before the
bundle is opened the process has given up every file but the bundle, its scratch folder and libraries (Landlock), and
the system calls for sockets, programs and other processes (seccomp). Where the kernel has neither, `archipel doctor`
says so, and these tests have nothing to show.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import generate_key
from archipel.lite_runtime import confinement, load
from tests.attacks.sandbox_bundles import SECRET, device_key, external, public, signed, upload
from tests.support.forking import Helper

offered = confinement.kernel_offers()
with_landlock = pytest.mark.skipif(not offered.landlock, reason="this kernel has no Landlock")
with_seccomp = pytest.mark.skipif(not offered.seccomp, reason="this kernel has no seccomp")

# What the attacker runs, one after the other, once the process has given up what it does; a line for each.
START = """
from archipel.lite_runtime.confinement import restrict
restrict([sys.argv[1]], [sys.argv[2]])
import onnxruntime
onnxruntime.set_default_logger_severity(4)
secret = sys.argv[3]
def call(name, *arguments):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
for attack in {attacks}:
    try:
        exec(attack)
    except Exception as error:
        print("refused:", type(error).__name__, " ".join(str(error).split()), flush=True)
    else:
        print("done:", " ".join(str(result).split()), flush=True)
"""


@pytest.fixture(params=["new", "forked"])
def attack(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """(attacks): what became of each, in a process that was started for it, or forked from a helper as an agent's."""
    secret = device_key(tmp_path)
    folder, scratch = (
        signed(tmp_path / "b", generate_key(), upload(external("t", "weights.safetensors"))),
        tmp_path / "s",
    )
    scratch.mkdir()

    def run(*attacks: str) -> list[str]:
        code, arguments = START.format(attacks=attacks), [str(folder), str(scratch), str(secret)]
        if request.param == "forked":
            with Helper(code, arguments=arguments, folder=scratch) as helper:
                _, told = helper.fork()
                assert helper.status(told) == 0
                helper.control.close()
                said = helper.process.communicate(timeout=60)[0]
        else:
            code = confinement.START_PYTHON + code
            command = [sys.executable, "-P", "-c", code, confinement.package_roots(), *arguments]
            said = subprocess.run(command, env={}, cwd=scratch, capture_output=True, text=True, check=True).stdout
        assert len(said.splitlines()) == len(attacks), said
        return said.splitlines()

    return run


@pytest.mark.sampled(every=3)
@with_landlock
def test_files(attack: Callable[..., list[str]], tmp_path: Path) -> None:
    attacks = [
        "result = open(secret, 'rb').read()",
        "result = open('../device.key', 'rb').read()",
        "os.symlink(secret, 'link'); result = open('link', 'rb').read()",
        "os.link(secret, 'hard'); result = open('hard', 'rb').read()",
        "os.rename(secret, 'mine'); result = open('mine', 'rb').read()",
        "result = open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "result = open('/etc/passwd').read()",
        "result = os.listdir(os.path.dirname(secret))",
        "open(secret, 'wb'); result = 'destroyed'",
        "open(sys.argv[1] + '/look.onnx', 'ab'); result = 'changed the bundle'",
    ]
    for what, found in zip(attacks, attack(*attacks), strict=True):
        # To link and to move between two folders of different rights is answered with EXDEV.
        refused = found.startswith("refused: PermissionError") or "Invalid cross-device link" in found
        assert refused, (what, found)
    assert (tmp_path / "device.key").read_bytes() == SECRET


@pytest.mark.sampled(every=3)
@with_landlock
def test_a_graph_that_onnxruntime_itself_is_told_to_open(attack: Callable[..., list[str]], tmp_path: Path) -> None:
    """What the inspection would have refused, put to ONNX Runtime in the confined process: outside there is nothing."""
    shutil.copy(tmp_path / "b" / "look.onnx", tmp_path / "outside.onnx")
    [found] = attack("result = onnxruntime.InferenceSession(os.path.dirname(secret) + '/outside.onnx')")
    assert found.startswith("refused: "), found
    assert "ermission denied" in found or "system error number 13" in found, found


@pytest.mark.sampled(every=3)
@with_seccomp
def test_sockets_programs_processes(attack: Callable[..., list[str]]) -> None:
    attacks = [
        "import socket; result = socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "import socket; result = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)",
        "import socket; result = socket.socketpair()",
        "os.execv('/bin/true', ['true']); result = None",
        "import subprocess; result = subprocess.run(['/bin/true'])",
        "result = os.fork() or os._exit(0)",
        "os.kill(os.getppid(), 0); result = 'may send signals'",
        "result = call('ptrace', 16, os.getppid(), 0, 0)",
        "result = call('syscall', 425, 8, bytes(120))",
        "result = call('unshare', 0x10000000)",
    ]
    for what, found in zip(attacks, attack(*attacks), strict=True):
        assert found.startswith("refused: PermissionError"), (what, found)


@pytest.mark.sampled(every=3)
def test_what_it_needs_is_left(attack: Callable[..., list[str]]) -> None:
    """The attacks fail for what was taken away, not because nothing works: the bundle, the scratch folder, threads."""
    [found] = attack(
        "import threading; t = threading.Thread(target=open('x', 'w').close); t.start(); t.join(); "
        "import tempfile; tempfile.tempdir = '.'; tempfile.TemporaryFile().write(b'1'); "
        "session = onnxruntime.InferenceSession(sys.argv[1] + '/look.onnx'); "
        "result = session.run(None, {'x': __import__('numpy').zeros(1, 'f')})"
    )
    assert found.startswith("done: "), found


@pytest.mark.sampled(every=3)
def test_the_real_child_is_held_by_all_that_the_kernel_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "swordfish")
    key = generate_key()
    folder = signed(tmp_path / "b", key, upload(external("t", "weights.safetensors")))
    with load(folder, public(key), isolated=True) as runtime:
        runtime.analyze(np.zeros(1, np.float32))
        assert runtime.confinement == offered
        process = Path(f"/proc/{runtime.pid}")
        assert b"swordfish" not in (process / "environ").read_bytes()
        scratch = Path(os.readlink(process / "cwd"))
        assert scratch.parent == confinement.scratch_root()
        assert not list(scratch.iterdir())
        if offered.seccomp:
            assert "Seccomp:\t2" in (process / "status").read_text()
    assert not scratch.exists()


@pytest.mark.sampled(every=3)
def test_the_scratch_folder_of_a_parent_that_was_killed_goes_with_the_next_start(tmp_path: Path) -> None:
    code = "import sys, time; from archipel.lite_runtime.confinement import Scratch; s = Scratch(); "
    code += "(s.path / 'left').write_text('x'); print(s.path, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        left = Path(parent.stdout.readline().strip())
        other = confinement.Scratch()
        assert (left / "left").exists()  # in use
        parent.kill()
    assert left.exists()
    again = confinement.Scratch()
    assert not left.exists()
    assert other.path.is_dir()
    for each in (other, again):
        each.remove()
        assert not each.path.exists()
