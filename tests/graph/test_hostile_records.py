"""Records in the metadata of an ONNX file, which anybody may have written: read, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from archipel import Model
from archipel.errors import ArchipelError
from archipel.graph.functions import inlined_functions
from archipel.graph.parameters import FIXED_KEY, NAMES_KEY, STATE_KEY, trainable_names
from archipel.graph.report import CONVERSION_KEY, REPORT_KEY, ImportReport, conversion_notes
from archipel.graph.source_state import source_state

TEXTS = {
    "cut": "[", "number": "3", "text": '"x"', "null": "null", "nested": "[[1]]", "table": '{"a": 1}', "empty": "",
    "deep": "[" * 100_000, "infinite": '{"source": "", "opset": 1e999, "samples": 1, "notes": []}',
    "no list": '{"buffers": 3, "frozen": {}}', "no names": "[1, null]",
    "objects": '{"a": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}}',
    "no dtype": '{"a": {"dtype": "f4,(", "shape": [1], "data": "AAAA"}}',
    "huge": '{"a": {"dtype": "f4", "shape": [99999999999999], "data": "AAAA"}}',
}  # fmt: skip
READERS: dict[str, Callable[[Model], object]] = {
    NAMES_KEY: lambda model: model.parameter_names,
    FIXED_KEY: lambda model: trainable_names(model.ir, "*"),
    STATE_KEY: source_state,
    REPORT_KEY: lambda model: ImportReport.of(model.ir),
    CONVERSION_KEY: lambda model: conversion_notes(model.ir),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    Model.from_torch(torch.nn.Linear(3, 2), torch.zeros(2, 3)).save(path)
    return path


def refusal(read: Callable[[], object]) -> str:
    """What the error says, "" where there is none; another exception than archipel's ends the test."""
    try:
        read()
    except ArchipelError as error:
        return str(error)
    return ""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("key", READERS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_record_is_read_or_refused(key: str, text: str, file: Path) -> None:
    model = Model.from_onnx(file)
    model.ir.metadata_props[key] = TEXTS[text]
    error = refusal(lambda: READERS[key](model))
    assert "damaged" in error or error == ""
    assert "\n" not in error
    if text in ("cut", "deep", "empty") and key not in (REPORT_KEY, CONVERSION_KEY):
        assert error


@pytest.mark.parametrize("text", TEXTS)
def test_a_record_of_inlined_functions(text: str, file: Path) -> None:
    graph = Model.from_onnx(file).ir.graph
    graph.metadata_props["archipel.inlined_functions"] = TEXTS[text]
    assert refusal(lambda: inlined_functions(graph)).startswith("the record of inlined functions is damaged")
