"""Import the heavy libraries once, and run pytest in forks: `forker.py IN:OUT ...`, which `test_rooms.py` starts.

Importing PyTorch and what the product stands on, and what `tests/warm_up.py` does, take seven to fifteen seconds of a
processor, more than many a room. This process does both once; its forks begin with what it has.

Each IN:OUT are the numbers of two pipes of a lane, whose forks run one after the other. A line of IN is a list of JSON:
the arguments of `recorder.py`. What a fork prints goes to OUT, between two lines that begin with MARK:

    MARK began 4711     the number of the fork
    MARK ended 1        its exit status, negative after a signal, after all that it has printed

A fork ends as any process does, with its own handlers. It imports the tests and their plugins itself, so that pytest
rewrites their assertions.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
from types import ModuleType

MARK = "\0"
LIBRARIES = (
    "hypothesis", "onnx", "onnx_ir", "onnxscript", "torch", "torch.export", "torch._dynamo", "scipy.stats", "msgspec",
    "flask", "sqlalchemy", "cryptography.hazmat.primitives.asymmetric.x25519",
)  # fmt: skip
THREADED = "onnxruntime"
"""It starts threads when it is imported, which a fork would lack. So each fork imports it by itself."""


def main() -> int:
    lanes = [tuple(int(handle) for handle in pair.split(":")) for pair in sys.argv[1:]]
    later = import_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it tells what became of the fork that the terminal interrupts
    for lane in lanes:
        if os.fork() == 0:
            for handle in (handle for other in lanes if other != lane for handle in other):
                os.close(handle)
            return serve(*lane, later)
    for handle in (handle for lane in lanes for handle in lane):
        os.close(handle)
    for _ in lanes:
        os.wait()
    return 0


def import_all() -> ModuleType | None:
    """Returns what each fork has to load."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py does, before PyTorch reads it
    later = put_off(THREADED)
    for library in ("recorder", *LIBRARIES):
        importlib.import_module(library)
    sys.path[0] = os.getcwd()  # as `python -m pytest` does
    if importlib.util.find_spec("tests.warm_up"):
        importlib.import_module("tests.warm_up").warm_up()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise SystemExit(f"forker.py: {threads} threads after the imports, of which a fork would have one")
    # The memory stays shared with the forks, whose collectors do not walk through it.
    gc.collect()
    gc.freeze()
    return later


def put_off(library: str) -> ModuleType | None:
    """Whoever imports it gets an empty module until `load` is called with what this returns; None: there is none."""
    spec = importlib.util.find_spec(library)
    if spec is None:
        return None
    sys.modules[library] = importlib.util.module_from_spec(spec)
    return sys.modules[library]


def load(module: ModuleType | None) -> None:
    if module is not None and module.__spec__ is not None and module.__spec__.loader is not None:
        module.__spec__.loader.exec_module(module)


def serve(requests: int, told: int, later: ModuleType | None) -> int:
    """Run what the lane asks for, one after the other, to the end of its requests."""
    # Read by hand: a fork would share what a file object has read ahead.
    for line in iter(lambda: read_line(requests), b""):
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (told, 1), (told, 2)):
                os.dup2(source, target)
            os.close(requests)
            os.close(told)
            load(later)
            sys.argv = ["recorder.py", *json.loads(line)]
            # Not above: processes that tests start with `multiprocessing` import this file, and would find no recorder.
            return int(importlib.import_module("recorder").main())
        tell(told, f"began {process}")
        tell(told, f"ended {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}")
    return 0


def read_line(handle: int) -> bytes:
    """Up to the next newline; empty at the end."""
    read = b""
    while not read.endswith(b"\n"):
        byte = os.read(handle, 1)
        if not byte:
            return b""
        read += byte
    return read


def tell(told: int, words: str) -> None:
    os.write(told, f"\n{MARK}{words}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
