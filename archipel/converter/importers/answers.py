"""An import beside its source: the answers of both to the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from archipel.graph.importing.comparison import Reference, deviation
from archipel.graph.model import Model


def compare(
    imported: Model,
    feeds: Iterable[Mapping[str, np.ndarray]],
    expected: Iterable[Sequence[np.ndarray]],
    outputs: slice = slice(None),
) -> float:
    """The largest deviation of the import, run in ONNX Runtime, from its source's answers to the same inputs.

    `expected` has for each feed the source's answers, to compare with these `outputs` of the import. Raises
    CannotRunError where ONNX Runtime cannot run the import, ModelImportError where the numbers of outputs differ.
    """
    runtime = Reference(imported.to_bytes())
    answers = [runtime.run(feed)[outputs] for feed in feeds]
    return max(deviation(ours, theirs) for ours, theirs in zip(answers, expected))
