from __future__ import annotations

import numpy as np
import pytest

from archipel.compression import FineTune, compress
from archipel.datasets import digits_by_writer
from archipel.graph import Model
from tests.support.digits import Digits, untrained


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """Trained by our own step graph on real digits until it knows most of them."""
    folder = tmp_path_factory.mktemp("digits")
    every = digits_by_writer()
    x, y = every.inputs(), every.targets()
    train, validation = ({"x": x[rows], "label": y[rows]} for rows in (slice(0, None, 8), slice(1, None, 40)))
    model, report = compress(untrained(), [FineTune(epochs=3, lr=3e-3)], train, validation=validation)
    assert (report.after.accuracy or 0) > 0.85
    model.save(folder / "model.onnx")
    few = {name: array[:256] for name, array in train.items()}
    np.savez(folder / "train.npz", **few)
    np.savez(folder / "validation.npz", **validation)  # type: ignore[arg-type]
    np.save(folder / "x.npy", few["x"])
    return Digits(Model.from_onnx(folder / "model.onnx"), few, validation, folder)
