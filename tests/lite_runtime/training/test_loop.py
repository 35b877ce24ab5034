"""The weights that a fit keeps when its loss is not finite, wherever that happens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from archipel.errors import NonFiniteLossError
from archipel.lite_runtime import Runtime
from archipel.lite_runtime.training import loop
from tests.support.text_bundles import Roles

W = np.array([[0.5, -1.0], [0.25, 2.0], [1.0, 0.0]], np.float32)
STEP = """(float[3, 2] w_new, float[3, 2] m_new, float loss) {
    p = MatMul(x, w)
    e = Sub(p, y)
    g = Gemm <transA = 1> (x, e)
    s = Mul(e, e)
    loss = ReduceMean <keepdims = 0> (s)
    nine = Constant <value_float = 0.9> ()
    kept = Mul(m, nine)
    m_new = Add(kept, g)
    u = Mul(m_new, lr)
    w_new = Sub(w, u)
}"""
INPUTS = "float[n, 3] x, float[n, 2] y, float[3, 2] w, float[3, 2] m, float lr"


@pytest.fixture(params=["plain", "noise"])
def rt(make: Callable[..., Runtime], r: type[Roles], request: pytest.FixtureRequest) -> Runtime:
    """SGD with momentum; the second program reads noise, and leaves it out."""
    roles = {
        "x": r.example, "y": r.label, "w": r.parameter("w"), "w_new": r.parameter("w"), "m": r.state("m", "round"),
        "m_new": r.state("m", "round"), "lr": r.hyper(0.05), "loss": r.metric(),
    }  # fmt: skip
    inputs, step = INPUTS, STEP
    if request.param == "noise":
        inputs += ", int64[3] z"
        unused = "f = Cast <to = 1> (z) \n zero = Sub(f, f) \n c = Unsqueeze(zero, one) \n h = Add(g, c)"
        step = step.replace("m_new = Add(kept, g)", f"{unused} \n m_new = Add(kept, h)")
        step = step.replace("p = MatMul", "one = Constant <value_ints = [1]> () \n p = MatMul")
        roles["z"] = r.noise("discrete_gaussian", 2.0)
    return make({"train": ("train", f"train ({inputs}) => {step}", roles)}, {"w": W})


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4, 5, 8, 11])
def test_all_steps_but_the_last_before_it_are_kept(
    rt: Runtime, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, bad: int
) -> None:
    """A loss tells about the step before. With noise the tensors that the step itself wrote are looked at."""
    noisy = "noise" in request.node.callspec.id
    monkeypatch.setattr(loop, "_SNAPSHOT_AFTER", 3)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((48, 3)).astype(np.float32), rng.standard_normal((48, 2)).astype(np.float32)
    broken = x.copy()
    broken[bad * 4 + 1] = np.nan
    with pytest.raises(
        NonFiniteLossError, match=f"{'is not finite after' if noisy else 'the loss is nan at'} step {bad};"
    ):
        rt.fit(broken, y, batch_size=4, shuffle=False)
    w, m = W.astype(np.float64), np.zeros((3, 2))
    for first in range(0, 4 * (bad if noisy else bad - 1), 4):
        a, b = x[first : first + 4], y[first : first + 4]
        m = 0.9 * m + a.T @ (a @ w - b)
        w = w - 0.05 * m
    np.testing.assert_allclose(rt.parameters()["w"], w, rtol=1e-4, atol=1e-6)
