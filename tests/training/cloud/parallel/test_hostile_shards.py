"""A folder of shards that somebody else wrote: it changes nothing in this process, and names no file but its own."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata

from archipel.errors import CheckpointError
from archipel.training.cloud.parallel.shards import _Unpickler, read_shards, write_shards

Table = Callable[[metadata.Metadata], object]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Linear(2, 2)
    return module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("own", "another"):
        write_shards(tmp_path / name, *made())
    return tmp_path / "own"


def refused(folder: Path) -> str:
    module, optimizer = made()
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        read_shards(folder, module, optimizer)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder: Path, change: Table, of: str = "") -> None:
    table = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    changed = [place for index, place in table.storage_data.items() if index.fqn.startswith(of)]
    assert changed
    for place in changed:
        change(place)
    (folder / ".metadata").write_bytes(pickle.dumps(table))


@pytest.mark.parametrize("name", ["../another/__0_0.distcp", "/dev/zero", "sub/__0_0.distcp", "..", "", 3, None])
def test_names_of_other_files(name: Any, folder: Path) -> None:
    rewrite(folder, lambda place: setattr(place, "relative_path", name))
    assert "is no file of the folder" in refused(folder)


def test_places_that_are_not_there_and_transformations(folder: Path) -> None:
    rewrite(folder, lambda place: setattr(place, "length", 1 << 62))
    refused(folder)
    rewrite(folder, lambda place: setattr(place, "transform_descriptors", ["zstd"]))
    assert "is no file of the folder" in refused(folder)


@pytest.mark.parametrize(
    "target",
    ["pathlib\nPosixPath", "torch.distributed.checkpoint.metadata\nMetadata", "torch.serialization\n_get_layout"],
)
def test_a_state_for_a_class_or_a_function(target: str, folder: Path) -> None:
    """BUILD sets attributes of whatever is on the stack: of pathlib's class, say, for the whole process."""
    (folder / ".metadata").write_bytes(b"\x80\x04c" + target.encode() + b"\n" + b"N}\x8c\x08hijackedK\x01s\x86b.")
    assert "which no checkpoint does" in refused(folder)
    assert not hasattr(Path, "hijacked")
    assert not hasattr(metadata.Metadata, "hijacked")
    assert not hasattr(torch.serialization._get_layout, "hijacked")


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["module.", "optimizer.param_groups."])
def test_code_in_place_of_tensors_and_numbers_and_no_advice_to_run_it(kind: str, folder: Path) -> None:
    evil = io.BytesIO()
    torch.save(Evil(folder / "done"), evil)
    (folder / "evil").write_bytes(evil.getvalue())

    def point(place: Any) -> None:
        place.relative_path, place.offset, place.length = "evil", 0, len(evil.getvalue())

    rewrite(folder, point, kind)
    assert refused(folder).endswith("it holds more than tensors, numbers and texts")
    assert not (folder / "done").exists()


def test_any_damage_of_the_table_is_an_error_in_one_line(folder: Path) -> None:
    sound, draw = (folder / ".metadata").read_bytes(), random.Random(0)
    for length in (0, 1, 5, len(sound) // 2, len(sound) - 1):
        (folder / ".metadata").write_bytes(sound[:length])
        refused(folder)
    module, optimizer = made()
    for _ in range(150):
        bytes_ = bytearray(sound)
        for _ in range(3):
            bytes_[draw.randrange(len(bytes_))] = draw.randrange(256)
        (folder / ".metadata").write_bytes(bytes_)
        try:
            read_shards(folder, module, optimizer)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017  (some damage, as of an offset's text, is none)
