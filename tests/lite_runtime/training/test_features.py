"""A frozen backbone's features, computed once per example and kept in memory or sealed on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import Phase
from archipel.bundle.roles import Feature
from archipel.lite_runtime import Progress, Runtime
from archipel.lite_runtime.engines.onnx_runtime import Session
from tests.support.text_bundles import Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0], [0.1, 0.3]], np.float32)
BACKBONE = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)

FEATURES = """features (float[n, 3] x) => (float[n, 4] f) <float[3, 4] backbone = {0,0,0,0,0,0,0,0,0,0,0,0}> {
    p = MatMul(x, backbone)
    f = Tanh(p)
}"""
# Half the squared error, mean over the batch.
STEP = """{
    p = MatMul(f, w)
    e = Sub(p, y)
    g = Gemm <transA = 1> (f, e)
    s = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (s)
    u = Mul(g, lr)
    w_new = Sub(w, u)
}"""
TRAIN = "train (float[n, 4] f, float[n, 2] y, float[4, 2] w, float lr) => (float[4, 2] w_new, float loss) " + STEP
FINISH = """finish (float[4, 2] w_start, float[4, 2] w) => (float[4, 2] d) { d = Sub(w, w_start) }"""


@pytest.fixture
def rt(make: Callable[..., Runtime], r: type[Roles]) -> Runtime:
    return build(make, r, FEATURES)


def build(make: Callable[..., Runtime], r: type[Roles], features: str) -> Runtime:
    w = r.parameter("w")
    feature = (Feature, {})
    programs = {
        "features": ("features", features, {"x": r.example, "f": feature}),
        "train": (
            "train",
            TRAIN,
            {"f": feature, "y": r.label, "w": w, "lr": r.hyper(0.1), "w_new": w, "loss": r.metric()},
        ),
        "finish": ("finish", FINISH, {"w_start": r.start("w"), "w": w, "d": r.update("w")}),
    }
    schedule = [Phase(program="train", epochs=2, batch_size=4)]
    return make(programs, {"w": W}, {"backbone": BACKBONE}, schedule)


def data(count: int = 21) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((count, 3)).astype(np.float32), rng.standard_normal((count, 2)).astype(np.float32)


def reference(x: np.ndarray, y: np.ndarray, epochs: int) -> tuple[np.ndarray, list[float]]:
    w, losses = W.astype(np.float64), []
    f = np.tanh(x @ BACKBONE)
    for _ in range(epochs):
        for first in range(0, len(x), 4):
            a, b = f[first : first + 4], y[first : first + 4]
            e = a @ w - b
            losses.append(float(np.mean(e**2)))
            w = w - 0.1 * a.T @ e
    return w, losses


def count_examples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    real = Session.run

    def run(self: Session, outputs: Sequence[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        if self.name == "features":
            seen.append(len(feed["x"]))
        return real(self, outputs, feed)

    monkeypatch.setattr(Session, "run", run)
    return seen


@pytest.mark.parametrize("budget", [1 << 20, 10 * 16, 0])
def test_each_example_meets_the_backbone_once(rt: Runtime, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    x, y = data()
    rt._feature_budget = budget
    seen = count_examples(monkeypatch)
    history = rt.fit(x, y, epochs=3, batch_size=4, shuffle=False)
    w, losses = reference(x, y, 3)
    assert sum(seen) == len(x)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(rt.parameters()["w"], w, rtol=1e-4)


def test_without_the_cache_it_runs_every_time(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    seen = count_examples(monkeypatch)
    history = rt.fit(x, y, epochs=3, batch_size=4, feature_cache=False)
    assert sum(seen) == 3 * len(x)
    without = rt.parameters()["w"]
    rt.reset("parameters")
    np.testing.assert_allclose(rt.fit(x, y, epochs=3, batch_size=4).losses, history.losses, rtol=1e-6)
    np.testing.assert_allclose(rt.parameters()["w"], without, rtol=1e-6, atol=1e-7)


def test_local_rounds_use_it_too(rt: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    seen = count_examples(monkeypatch)
    update = rt.local_round(x, y, seed=3)
    assert sum(seen) == len(x)
    assert update.examples == len(x)
    np.testing.assert_allclose(update.arrays["d"], update.parameters["w"] - W)


def test_a_backbone_for_batches_of_one_size(
    make: Callable[..., Runtime], r: type[Roles], monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = build(make, r, FEATURES.replace("[n, ", "[3, "))
    x, y = data()
    history = rt.fit(x, y, epochs=1, batch_size=4, shuffle=False)
    np.testing.assert_allclose(history.losses, reference(x, y, 1)[1], rtol=1e-5)


def files_without_a_name(folder: Path) -> list[Path]:
    """Those that this process has open in `folder`."""
    handles = [handle for handle in Path("/proc/self/fd").iterdir() if handle.is_symlink()]
    return [h for h in handles if os.path.lexists(h) and os.readlink(h).startswith(f"{folder}/")]


def test_what_is_on_disk_has_no_name_and_is_sealed(
    rt: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    x, y = data()
    rt._feature_budget = 0
    found: list[bytes] = []

    def look(progress: Progress) -> None:
        if progress.step == 5:
            assert not list(folder.iterdir())
            found.extend(handle.read_bytes() for handle in files_without_a_name(folder))

    rt.fit(x, y, epochs=2, batch_size=4, shuffle=False, callbacks=[look])
    assert [len(content) for content in found] == [len(x) * (16 + 16)]
    for row in np.tanh(x @ BACKBONE):
        assert row[:2].tobytes() not in found[0]
    assert not files_without_a_name(folder)
