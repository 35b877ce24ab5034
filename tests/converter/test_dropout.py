"""A model with Dropout from conversion to a device, which draws the masks from the round's seed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx

from archipel import bundle as b
from archipel import lite_runtime, training
from archipel.bundle import role_of
from archipel.converter import Signing, Training, convert
from archipel.graph import Model


def test_training_drops_and_prediction_does_not(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[batch, 6] x) => (float[batch, 3] y) <float[6, 3] w> { d = Dropout (x) y = MatMul (d, w) }"""
    )
    rng = np.random.default_rng(0)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal((6, 3), np.float32), "w"))
    bundle = convert(
        Model.from_proto(proto), tmp_path / "dropout",
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd(lr=0.1)),
        signing=Signing(b.generate_key()),
    )  # fmt: skip
    programs = bundle.manifest.programs
    assert {"seed", "step"} <= {role_of(port) for port in programs["train"].inputs}
    assert not {"seed", "step"} & {role_of(p) for name in ("predict", "evaluate") for p in programs[name].inputs}
    x, y = rng.standard_normal((32, 6), np.float32), rng.integers(0, 3, 32)
    losses = []
    for seed in (1, 1, 2):
        device = lite_runtime.Runtime(bundle)
        losses.append(device.fit(x, y, epochs=2, batch_size=32, seed=seed, shuffle=False).losses)
        np.testing.assert_array_equal(device.predict(x), device.predict(x))
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
