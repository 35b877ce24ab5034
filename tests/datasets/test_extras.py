"""Data sets of arrays need NumPy alone; files say which extra they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archipel.datasets import open_arrow, open_audio, open_csv, open_images, open_parquet, write_records
from archipel.errors import MissingExtraError

LIBRARIES = ("pyarrow", "PIL", "soundfile", "torch", "onnx", "onnxruntime", "pandas")


@pytest.mark.sampled(every=3)
def test_no_library_is_imported_before_a_file_needs_it() -> None:
    code = (
        "import sys, archipel.datasets as d, numpy as np;"
        "list(d.Batches(d.checked((np.ones((4, 2)), np.arange(4))), 2)); d.summarize({'x': np.ones(3)});"
        f"print([name for name in {LIBRARIES} if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("library", "suffix", "call"),
    [
        ("pyarrow", "csv", open_csv),
        ("pyarrow", "parquet", open_parquet),
        ("pyarrow", "arrow", open_arrow),
        ("pyarrow", "parquet", lambda path: write_records({"x": [1]}, path)),
        ("PIL", "png", lambda path: open_images(path.parent)),
        ("soundfile", "wav", lambda path: open_audio(path.parent)),
    ],
)
def test_a_library_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, suffix: str, call: object
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == library:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / f"t.{suffix}").write_text("a,b\n1,2\n")
    package = {"PIL": "Pillow"}.get(library, library)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed; .*'archipel\[data\]'"):
        call(tmp_path / f"t.{suffix}")  # type: ignore[operator]
