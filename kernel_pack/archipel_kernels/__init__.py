"""The kernel pack of archipel: where the library of custom operators is."""

from __future__ import annotations

import ctypes
from importlib.metadata import files, version
from pathlib import Path

__version__ = "0.1.0"
ONEDNN = "onednn-cpu-gomp"


def library() -> str:
    """The path of the library for `SessionOptions.register_custom_ops_library`.

    Loads oneDNN first, so that the library finds it wherever it is installed. Raises OSError if it cannot be loaded.
    """
    for file in files(ONEDNN) or ():
        if file.name == "libdnnl.so.3":
            ctypes.CDLL(str(Path(str(file.locate())).resolve()))
            return str(Path(__file__).with_name("libarchipel_kernels.so"))
    raise OSError(f"{ONEDNN} has no library; install it again")


def title() -> str:
    """Name and version, for reports."""
    return f"archipel-kernels {__version__} on oneDNN ({ONEDNN} {version(ONEDNN)})"
