"""A damaged or packed checkpoint is refused before PyTorch reads it, whose reader takes changed bytes as they are."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from archipel.errors import CheckpointError
from archipel.training.cloud.checkpoints.checkpoint import read_checkpoint, write_checkpoint

WEIGHTS = torch.arange(1000, dtype=torch.float32)


class Code:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "last.pt", {"seed": 0}, {"weights": WEIGHTS})
    return tmp_path / "last.pt"


def test_it_is_read_back(path: Path) -> None:
    assert torch.equal(read_checkpoint(path, {"seed": 0})["weights"], WEIGHTS)


def test_a_changed_byte_of_a_tensor_is_found(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(WEIGHTS.numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged \(bytes of .*data/0 have changed\); delete it"):
        read_checkpoint(path, {"seed": 0})


def test_compressed_members_are_refused(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="its members are compressed"):
        read_checkpoint(packed, {"seed": 0})


def test_nothing_advises_to_run_code_of_the_file(path: Path) -> None:
    torch.save({"weights": Code()}, path)
    with pytest.raises(CheckpointError, match="more than tensors, numbers and texts") as caught:
        read_checkpoint(path, {"seed": 0})
    assert "weights_only" not in str(caught.value)
    assert "\n" not in str(caught.value)
