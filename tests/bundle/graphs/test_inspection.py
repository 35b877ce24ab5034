"""The walk over graphs, on the graphs that the browser's is tested on as well (web/tests/graph_corpus.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archipel.bundle.graphs import inspect_graph, inspection, wire
from archipel.errors import UnsafeGraphError

GRAPHS = Path(__file__).resolve().parents[3] / "web" / "tests" / "graphs"
INDEX = json.loads((GRAPHS / "graphs.json").read_text())
WEIGHTS = ("weights.safetensors", INDEX["weights"])


@pytest.mark.parametrize("name", INDEX["graphs"])
def test_graph(name: str) -> None:
    data, error = (GRAPHS / f"{name}.onnx").read_bytes(), INDEX["graphs"][name]
    if error is None:
        inspect_graph("p", data, WEIGHTS)
        return
    with pytest.raises(UnsafeGraphError, match=r"^program 'p': ") as raised:
        inspect_graph("p", data, WEIGHTS)
    assert error in str(raised.value)


def test_without_weights_nothing_is_external() -> None:
    with pytest.raises(UnsafeGraphError, match="which has 0"):
        inspect_graph("p", (GRAPHS / "good_external_initializer.onnx").read_bytes(), ("weights.safetensors", 0))


def test_limits_come_before_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (GRAPHS / "good_relu.onnx").read_bytes()
    monkeypatch.setattr(wire, "MAX_FIELDS", 5)
    with pytest.raises(UnsafeGraphError, match="more than 5 fields"):
        inspect_graph("p", data, WEIGHTS)
    monkeypatch.setattr(inspection, "MAX_GRAPH_BYTES", len(data) - 1)
    with pytest.raises(UnsafeGraphError, match=f"{len(data)} bytes, the limit is {len(data) - 1}"):
        inspect_graph("p", data, WEIGHTS)
