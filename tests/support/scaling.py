"""Graphs that multiply by a number, and the slots that run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from archipel import bundle as b
from archipel.lite_runtime.slots.model_slots import Slots
from tests.support.text_bundles import BundleMaker, Roles

X = np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], np.float32)
SCALE = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { y = Mul(x, w) }"
LOG = "predict (float[n, 3] x, float[3] w) => (float[n, 3] y) { q = Add(x, w) \n y = Log(q) }"
# Fails in the runtime, not before, for a batch that has another number of rows than 2 (and no vectors need it).
TWO_ROWS = """predict (float[n, 3] x, float[3] w) => (float[n, 3] y)
  <int64[2] shape = {2, 3}> { z = Mul(x, w) \n y = Reshape(z, shape) }"""
LEARN = """train (float[n, 3] x, float[3] w, float lr) => (float[3] w_new, float loss) {
    w_new = Sub(w, lr)
    loss = ReduceMean <keepdims = 0> (x)
}"""


class ScalingModels:
    """Bundles that multiply by `factor`, with vectors that say so (or say something else); each is made once."""

    def __init__(self, make_bundle: BundleMaker, folder: Path) -> None:
        self._make_bundle = make_bundle
        self._folder = folder
        self._made: dict[tuple[object, ...], Path] = {}

    def __call__(
        self, factor: float, graph: str = SCALE, vectors: bool = True, tested: float | None = None, **more: Any
    ) -> Path:
        at = (factor, graph, vectors, tested, *more.items())
        if at in self._made:
            return self._made[at]
        w = Roles.parameter("w")
        programs = {
            "predict": ("predict", graph, {"x": Roles.example, "w": w, "y": Roles.output}),
            "train": (
                "train",
                LEARN,
                {"x": Roles.example, "w": w, "lr": Roles.hyper(0.5), "w_new": w, "loss": Roles.metric()},
            ),
        }
        folder = self._make_bundle(programs, {"w": np.full(3, factor, np.float32)}, **more)
        if vectors:
            old = b.open_bundle(folder, [self._make_bundle.key.public_key().public_bytes_raw()])
            y = X * np.float32(factor if tested is None else tested)
            target = self._folder / f"tested-{len(self._made)}"
            b.write_bundle(
                target,
                name=f"times {factor:g}",
                programs=old.manifest.programs,
                graphs={p.file: (folder / p.file).read_bytes() for p in old.manifest.programs.values()},
                weights=(folder / b.WEIGHTS_FILE).read_bytes(),
                parameters=old.manifest.parameters,
                limits=old.manifest.limits,
                privacy=old.manifest.privacy,
                key=self._make_bundle.key,
                self_test=(
                    b.SelfTest(file="t.safetensors", rtol=1e-6, atol=0.0),
                    b.write_weights({"example/x": X, "output/y": y}),
                ),
            )
            folder = target
        self._made[at] = folder
        return folder


def statuses(slots: Slots) -> tuple[str, str, str]:
    return slots.state.active, slots.state.a.status, slots.state.b.status
