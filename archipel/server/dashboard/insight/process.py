"""Starts the process that reads stored models for the dashboard, and takes what it has made.

A bundle is somebody else's: its graphs are parsed by other people's C++, and its weights may be larger than memory. So
no web process reads one. The process that does opens the files that it is given, its own folder and libraries alone,
no socket and no program (Landlock, seccomp); its memory, its time and the files that it writes are bounded, and what it
has made is data to this process, which looks at its size alone.

It is a module of archipel.insight, which stands above the server, so it is started by its name and imported nowhere
here. It needs the extra `insight`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from archipel.errors import ServerError
from archipel.lite_runtime.confinement import START_PYTHON, package_roots

CPU_SECONDS = 60.0
SECONDS = 120
MEMORY_BYTES = 1 << 30
"""Private memory that it may add; weights are mapped, and do not count."""
MOST_MODEL_BYTES = 1 << 30
"""Bytes of a bundle, and of weights, that are read."""
MOST_DOCUMENT_BYTES = 32 << 20
NEEDS = ("onnx", "onnx_ir")
DOCUMENT, PROBLEM = "document.json", "problem.txt"
"""The files of archipel.insight.documents."""
TOO_MUCH = (
    f"reading it takes more than the server has for it ({CPU_SECONDS:g} s of computing, {MEMORY_BYTES >> 20} MiB); "
    "look at the file with `archipel insight FILE` on your machine"
)
LACKING = "this server lacks what reads graphs: whoever runs it can install it (pip install 'archipel[insight]')"
FAILED = "the process that reads it has failed; the server's log says how"
_NO_MEMORY = re.compile(rb"MemoryError|bad_alloc|[Cc]annot allocate memory")
_MOST_PROBLEM_BYTES = 4096
_LAST_WORDS = 600
_START = f"""{START_PYTHON}
import json
from archipel.lite_runtime.confinement import restrict
from archipel.lite_runtime.confinement.limiting import limit_work
limits, reads = json.loads(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
request = sys.stdin.buffer.read()
restrict(reads, [os.getcwd()])
limit_work(**limits)
from archipel.insight.documents import write_document
write_document(request)
"""
_log = logging.getLogger(__name__)


def make_document(request: Mapping[str, Any], reads: Iterable[Path], folder: Path) -> BinaryIO | str:
    """The open file of the document that the process makes, or why there is none, for people.

    Arguments:
        request: archipel.insight.documents.Request, without its limit.
        reads: the files and folders that it may read, absolute.
        folder: a folder for it, absolute, in which are links to these files alone.

    Raises ServerError where no process can be started.
    """
    if any(importlib.util.find_spec(name) is None for name in NEEDS):
        return LACKING
    asked = {**request, "most_bytes": MOST_DOCUMENT_BYTES}
    limits = {
        "parent": os.getpid(), "cpu_seconds": CPU_SECONDS, "seconds": SECONDS, "memory": MEMORY_BYTES,
        "file_bytes": 2 * MOST_MODEL_BYTES,
    }  # fmt: skip
    arguments = [package_roots(), json.dumps(limits), json.dumps([str(path) for path in reads])]
    with tempfile.TemporaryFile() as words:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=words, env={}, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            raise ServerError(f"{sys.executable}: cannot be started ({error.strerror})") from None
        with process:
            try:
                process.communicate(json.dumps(asked).encode(), timeout=SECONDS + 10)
            except subprocess.TimeoutExpired:
                process.kill()
        if process.returncode:
            size = words.seek(0, os.SEEK_END)
            words.seek(max(0, size - _LAST_WORDS))
            said = words.read()
            _log.warning("insight: the process ended with code %s: %r", process.returncode, said)
            # A limit ends it by a signal, or Python and C++ say that there is no memory.
            return TOO_MUCH if process.returncode < 0 or _NO_MEMORY.search(said) else FAILED
    problem = _open_plain(folder / PROBLEM, _MOST_PROBLEM_BYTES)
    if problem is not None:
        with problem:
            return problem.read().decode(errors="replace")
    return _open_plain(folder / DOCUMENT, MOST_DOCUMENT_BYTES) or TOO_MUCH


def _open_plain(path: Path, most: int) -> BinaryIO | None:
    """A file that the process has written, if it is one, no link, and not too large."""
    try:
        # A model that has taken the process over could have put a link there, or a pipe that never ends.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most:
        os.close(handle)
        return None
    return open(handle, "rb")
