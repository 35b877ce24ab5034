"""A publisher's pipeline was broken into: what it uploads is signed, and its graph reads the devices' files.

Devices refuse such a bundle by themselves. The server refuses it as well, at the door, so that no fleet downloads it
and no operator is told that it was published. The server runs no graph and has no ONNX package: it walks the bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from archipel.bundle import pack
from tests.attacks.sandbox_bundles import external, signed, upload
from tests.support.fixtures.server import (  # noqa: F401  (fixtures)
    bundle_file,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.world import World


@pytest.mark.parametrize("location", ["../device.key", "/etc/passwd", "weights.safetensors"])
def test_upload(world: World, tmp_path: Path, location: str) -> None:  # noqa: F811
    folder = signed(tmp_path / "b", world.keys.publisher, upload(external("t", location)))
    pack(folder, tmp_path / "b.bundle")
    status, answer = world.operator("POST", "/v1/bundles", (tmp_path / "b.bundle").read_bytes())
    if location == "weights.safetensors":
        assert status == 201, answer
        assert world.stored(".")
        return
    assert status == 422, answer
    assert location in str(answer)
    assert "weights.safetensors" in str(answer)
    assert not world.stored(".")  # nothing of it is kept
