"""Importers are found by whoever asks for them, and loaded only then."""

from __future__ import annotations

import subprocess
import sys

import pytest

from archipel.errors import ModelImportError
from archipel.importer_registry import IMPORTERS, Importers, find_importer


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("first", ["import archipel", "from archipel.graph import Model", "import archipel.errors"])
@pytest.mark.sampled(every=4)
def test_nothing_else_has_to_be_imported(first: str) -> None:
    code = f"""
import sys
{first}
import archipel.graph
loaded = lambda: [name for name in ("archipel.converter", "torch", "sklearn", "skl2onnx") if name in sys.modules]
print(loaded())
print(sorted(archipel.graph.IMPORTERS), loaded())
print(archipel.importer_registry.find_importer("torch").__module__)
"""
    assert run(code) == "[]\n['sklearn', 'torch'] ['archipel.converter']\narchipel.converter.importers.torch\n"


def test_the_importers_are_those_of_the_package() -> None:
    assert {source: function.__name__ for source, function in IMPORTERS.items()} == {
        "sklearn": "from_sklearn",
        "torch": "from_torch",
    }
    assert len(IMPORTERS) == 2
    with pytest.raises(ModelImportError, match="no importer for 'caffe'; known: sklearn, torch"):
        find_importer("caffe")


def test_loading_that_fails_is_tried_again() -> None:
    table, calls = Importers(), []

    def load() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ModuleNotFoundError("not yet")
        table.register("own")(print)

    table.load_with(load)
    with pytest.raises(ModuleNotFoundError):
        _ = "own" in table
    assert table["own"] is print
    assert list(table) == ["own"]
    assert calls == [0, 1]
