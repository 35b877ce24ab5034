"""A made-up machine: files below a folder that stands for /."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """(path -> text or bytes; None takes it away) -> the root, with what earlier calls put there."""
    root = tmp_path / "root"
    root.mkdir()

    def put(files: dict[str, str | bytes | None]) -> Path:
        for name, content in files.items():
            path = root / name
            if content is None:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())
        return root

    return put
