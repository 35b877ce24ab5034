"""Reports to the owner what protects this machine from the graphs that it runs, and tries it out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from archipel.lite_runtime.confinement.places import START_PYTHON, package_roots
from archipel.lite_runtime.confinement.restricting import kernel_offers
from archipel.lite_runtime.confinement.scratch import Scratch, scratch_root

NEEDED = (1, 24, 1)
"""The first version of ONNX Runtime that keeps external data within the model's folder."""
_TRIAL_SECONDS = 30.0
_TRIAL = """
import json, socket
from archipel.lite_runtime.confinement import restrict
restrict([], [os.getcwd()])
def refused(attempt):
    try:
        attempt()
    except PermissionError:
        return True
    return False
print(json.dumps({
    "files": refused(lambda: open(sys.argv[1]).close()),
    "sockets": refused(lambda: socket.socket().close()),
    "programs": refused(lambda: os.posix_spawn("/bin/true", ["true"], {})),
}))
"""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One protection: its `name`, whether it `holds`, and `what` it does in words, or the remedy."""

    name: str
    holds: bool
    what: str


def holdings() -> list[Holding]:
    """The protections that the installed software and the kernel offer. Starts no process."""
    offers = kernel_offers()
    processes = sys.platform == "linux"
    return [
        _check_onnxruntime(),
        Holding(
            name="processes",
            holds=processes,
            what="graphs run in a process with limits" if processes else "only Linux can run graphs in one with limits",
        ),
        Holding(
            name="files",
            holds=offers.landlock > 0,
            what=f"Landlock, version {offers.landlock}: that process opens its bundle, its scratch folder, libraries"
            if offers.landlock
            else "no Landlock: that process can open all files of its user. Needs Linux 5.13, and `landlock` in lsm=",
        ),
        Holding(
            name="sockets",
            holds=offers.seccomp,
            what="seccomp: that process opens no sockets, starts no programs, looks into no others"
            if offers.seccomp
            else "no seccomp, or not for this processor: that process may open sockets and start programs",
        ),
        *([_check_scratch()] if processes else []),
    ]


def trial() -> list[Holding]:
    """Start a process, confine it like one that runs graphs, and let it try what must be refused."""
    if sys.platform != "linux":
        return []
    offers = kernel_offers()
    expected = {"files": offers.landlock > 0, "sockets": offers.seccomp, "programs": offers.seccomp}
    try:
        refused = _try_forbidden()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [Holding(name="trial", holds=False, what=f"a confined process does not work here: {error}")]
    return [
        Holding(name=f"trial: {name}", holds=refused[name], what="refused" if refused[name] else "not refused")
        for name in expected
    ]


def _try_forbidden() -> dict[str, bool]:
    scratch = Scratch()
    try:
        # A file that exists and that this user may read: only Landlock can refuse it.
        with tempfile.NamedTemporaryFile(prefix="archipel-doctor-") as outside:
            done = subprocess.run(
                [sys.executable, "-P", "-c", START_PYTHON + _TRIAL, package_roots(), outside.name],
                env={},  # as a child that runs graphs
                cwd=scratch.path,
                capture_output=True,
                timeout=_TRIAL_SECONDS,
                check=False,
            )
    finally:
        scratch.remove()
    if done.returncode:
        # The last line of a traceback names the error.
        lines = done.stderr.decode(errors="replace").splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(lines[-1][:300])
    refused: dict[str, bool] = json.loads(done.stdout)
    return refused


def _check_onnxruntime() -> Holding:
    import onnxruntime

    version = str(onnxruntime.__version__)
    holds = tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= NEEDED
    wanted = ".".join(map(str, NEEDED))
    what = (
        f"ONNX Runtime {version}, at least {wanted}" if holds else f"ONNX Runtime {version}; install {wanted} or newer"
    )
    return Holding(name="graphs", holds=holds, what=f"{what}; every graph is inspected before it runs")


def _check_scratch() -> Holding:
    try:
        return Holding(name="scratch", holds=True, what=f"{scratch_root()}, of this user alone")
    except OSError as error:
        return Holding(name="scratch", holds=False, what=str(error))


def folder_modes(folder: Path, names: tuple[str, ...]) -> list[Holding]:
    """Whether only the owner can read the files `names` of a device's folder. Leaves out files that are missing."""
    modes = []
    for name in names:
        try:
            mode = (folder / name).stat().st_mode & 0o777
        except OSError:
            continue
        remedy = "" if not mode & 0o077 else f": others may read it; run: chmod 600 {folder / name}"
        modes.append(Holding(name=name, holds=not mode & 0o077, what=f"mode {mode:04o}{remedy}"))
    return modes
