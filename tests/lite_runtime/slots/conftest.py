"""Bundles that multiply by a number, and slots that one of them runs in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel import bundle as b
from archipel.lite_runtime.slots.model_slots import Slots

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

MakeModel = Callable[..., Path]


@pytest.fixture
def trusted(key: Any) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


@pytest.fixture
def model(make_bundle: Callable[..., Path], r: Any, key: Any, tmp_path: Path) -> MakeModel:
    """A bundle that multiplies by `factor`, with vectors that say so (or say something else)."""
    made: dict[Any, Path] = {}

    def make(factor: float, graph: str = SCALE, vectors: bool = True, tested: float | None = None, **more: Any) -> Path:
        at = (factor, graph, vectors, tested, *more.items())
        if at in made:
            return made[at]
        w = r.parameter("w")
        programs = {
            "predict": ("predict", graph, {"x": r.example, "w": w, "y": r.output}),
            "train": ("train", LEARN, {"x": r.example, "w": w, "lr": r.hyper(0.5), "w_new": w, "loss": r.metric()}),
        }
        folder = make_bundle(programs, {"w": np.full(3, factor, np.float32)}, **more)
        if vectors:
            old = b.open_bundle(folder, [key.public_key().public_bytes_raw()])
            y = X * np.float32(factor if tested is None else tested)
            target = tmp_path / f"tested-{len(made)}"
            b.write_bundle(
                target,
                name=f"times {factor:g}",
                programs=old.manifest.programs,
                graphs={p.file: (folder / p.file).read_bytes() for p in old.manifest.programs.values()},
                weights=(folder / b.WEIGHTS_FILE).read_bytes(),
                parameters=old.manifest.parameters,
                limits=old.manifest.limits,
                privacy=old.manifest.privacy,
                key=key,
                self_test=(
                    b.SelfTest(file="t.safetensors", rtol=1e-6, atol=0.0),
                    b.write_weights({"example/x": X, "output/y": y}),
                ),
            )
            folder = target
        made[at] = folder
        return folder

    return make


@pytest.fixture
def running(model: MakeModel, trusted: list[bytes], tmp_path: Path) -> Any:
    """Slots with "times 2" good and active in slot a."""
    with Slots(tmp_path / "slots", trusted, confirm_after=None) as slots:
        slots.install(model(2))
        slots.switch()
        slots.confirm()
        yield slots


def statuses(slots: Slots) -> tuple[str, str, str]:
    return slots.state.active, slots.state.a.status, slots.state.b.status
