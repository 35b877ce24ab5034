"""What Python's zipfile raises for a damaged archive."""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib

# The documentation names BadZipFile alone. Others come from the decompressors (bz2 raises OSError), from names that are
# no text and places outside the file (ValueError), from unknown versions and methods (NotImplementedError, which is a
# RuntimeError), and from members that are encrypted.
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError
)  # fmt: skip
