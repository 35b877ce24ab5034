"""Archives with damage: zipfile raises nothing but ZIP_ERRORS, and commands nothing but CommandError."""

from __future__ import annotations

import contextlib
import io
import random
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from archipel.cli.input_output.arrays import read_arrays
from archipel.errors import CommandError
from archipel.zips import ZIP_ERRORS

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def damaged(seed: int) -> bytes:
    rng = random.Random(seed)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", rng.choice(METHODS)) as archive:
        for name in ("a.npy", "ü.npy"):
            member = io.BytesIO()
            np.save(member, np.frombuffer(rng.randbytes(48) * 3))
            archive.writestr(name, member.getvalue())
    data = bytearray(buffer.getvalue())
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(data))
        data[at] = rng.choice([0, 127, 128, 255, data[at] ^ 1 << rng.randrange(8)])
    return bytes(data)


@pytest.mark.parametrize("cases", [400, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_damaged_archives(tmp_path: Path, cases: int) -> None:
    seen: Counter[type[Exception]] = Counter()
    path = tmp_path / "x.npz"
    for seed in range(cases):
        data = damaged(seed)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for member in archive.infolist():
                    archive.read(member) if member.file_size < 1 << 20 else None
        except ZIP_ERRORS as error:
            seen[type(error)] += 1
        path.write_bytes(data)
        with contextlib.suppress(CommandError):
            read_arrays(path)
    assert len(seen) > 5, seen  # of all kinds that the comment names
