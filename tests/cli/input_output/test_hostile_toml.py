"""Files of settings that nobody could have meant: every reader refuses them in one line that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from archipel.bundle import parse_card
from archipel.compression.recipe import load_recipe
from archipel.errors import ArchipelError
from archipel.preprocessing.settings import load_settings
from archipel.simulation import load_federation
from archipel.simulation.system.traces import read_devices
from archipel.toml_files import read_toml
from archipel.training.cloud.planner.cluster import read_cluster

READERS: dict[str, Callable[[Path], object]] = {
    "federation": load_federation,
    "training": read_toml,
    "cluster": read_cluster,
    "trace": read_devices,
    "recipe": load_recipe,
    "preprocessing": load_settings,
}
TEXTS = {
    "deep": b"a = " + b"[" * 100_000,
    "digits": b"a = " + b"9" * 10_000,
    "no text": b"\xff\xfe\x00",
    "cut": b"[a",
    "date": b"a = 2020-99-99",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_one_line_that_names_the_file(reader: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "file.toml"
    file.write_bytes(TEXTS[text])
    with pytest.raises(ArchipelError) as caught:
        READERS[reader](file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["deep", "digits", "cut", "date"])
def test_a_card(text: str) -> None:
    with pytest.raises(ArchipelError, match=r"^card: "):
        parse_card(TEXTS[text].decode()[:50_000])
