"""LSTM, GRU and RNN as ONNX defines them, one sequence and one step at a time.

onnx.reference's own know no sequence lengths, one direction and few attributes.
tests/autodiff/test_recurrent.py compares these with ONNX Runtime's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

Array = np.ndarray
Functions = list[Callable[[Array], Array]]

# name -> (function of x, alpha, beta; defaults of those it takes)
ACTIVATIONS: dict[str, tuple[Callable[[Array, float, float], Array], tuple[float, ...]]] = {
    "Sigmoid": (lambda x, a, b: 1 / (1 + np.exp(-x)), ()),
    "Tanh": (lambda x, a, b: np.tanh(x), ()),
    "Relu": (lambda x, a, b: np.maximum(x, 0), ()),
    "Affine": (lambda x, a, b: a * x + b, (1.0, 0.0)),
    "LeakyRelu": (lambda x, a, b: np.where(x >= 0, x, a * x), (0.01,)),
    "ThresholdedRelu": (lambda x, a, b: np.where(x > a, x, 0), (1.0,)),
    "ScaledTanh": (lambda x, a, b: a * np.tanh(b * x), (1.0, 1.0)),
    "HardSigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), (0.2, 0.5)),
    "Elu": (lambda x, a, b: np.where(x >= 0, x, a * (np.exp(x) - 1)), (1.0,)),
    "Softsign": (lambda x, a, b: x / (1 + np.abs(x)), ()),
    "Softplus": (lambda x, a, b: np.log1p(np.exp(x)), ()),
}


def functions(names: list[str], alphas: list[float], betas: list[float]) -> Iterator[Callable[[Array], Array]]:
    for name in names:
        function, defaults = ACTIVATIONS[name]
        a = (alphas.pop(0) if alphas else defaults[0]) if defaults else 0.0
        b = (betas.pop(0) if betas else defaults[1]) if len(defaults) > 1 else 0.0
        yield lambda x, function=function, a=a, b=b: function(x, a, b)


class Layer(OpRun):
    op_domain = ""
    gates = 1
    states = 1
    defaults: tuple[str, ...] = ("Tanh",)

    def _run(self, x: Array, w: Array, r: Array, *others: Array | None, **given: Any) -> tuple[Array, ...]:
        bias, lengths, *initial, peepholes = [*others, *[None] * (5 - len(others))]
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("layout"):
            x = x.swapaxes(0, 1)
            initial = [None if v is None else v.swapaxes(0, 1) for v in initial]
        steps, batch, _ = x.shape
        directions, _, hidden = r.shape
        names = given.get("activations") or list(self.defaults) * directions
        called = list(functions(names, [*given.get("activation_alpha", [])], [*given.get("activation_beta", [])]))
        clip = given.get("clip", np.inf)
        y = np.zeros((steps, directions, batch, hidden), x.dtype)
        ends = np.zeros((self.states, directions, batch, hidden), x.dtype)
        for d in range(directions):
            b = np.zeros(2 * self.gates * hidden, x.dtype) if bias is None else bias[d]
            p = np.zeros(3 * hidden, x.dtype) if peepholes is None else peepholes[d]
            own = called[d * len(self.defaults) : (d + 1) * len(self.defaults)]
            backwards = given.get("direction") == "reverse" or d == 1
            for n in range(batch):
                length = steps if lengths is None else int(lengths[n])
                if not length:
                    continue  # ONNX Runtime gives zeros here, and ONNX says nothing
                state = [np.zeros(hidden, x.dtype) if v is None else v[d, n] for v in initial[: self.states]]
                for t in range(length)[:: -1 if backwards else 1]:
                    state = self.step(w[d] @ x[t, n], r[d], b, p, state, own, clip, given)
                    y[t, d, n] = state[0]
                ends[:, d, n] = state
        if given.get("layout"):
            return tuple([y.transpose(2, 0, 1, 3), *ends.swapaxes(1, 2)][: len(self.onnx_node.output)])
        return tuple([y, *ends][: len(self.onnx_node.output)])

    def step(
        self,
        wx: Array,
        r: Array,
        b: Array,
        p: Array,
        state: list[Array],
        f: Functions,
        clip: float,
        given: dict[str, Any],
    ) -> list[Array]:
        raise NotImplementedError


class RNN(Layer):
    def step(
        self,
        wx: Array,
        r: Array,
        b: Array,
        p: Array,
        state: list[Array],
        f: Functions,
        clip: float,
        given: dict[str, Any],
    ) -> list[Array]:
        half = len(b) // 2
        return [f[0](np.clip(wx + r @ state[0] + b[:half] + b[half:], -clip, clip))]


class GRU(Layer):
    gates = 3
    defaults = ("Sigmoid", "Tanh")

    def step(
        self,
        wx: Array,
        r: Array,
        b: Array,
        p: Array,
        state: list[Array],
        f: Functions,
        clip: float,
        given: dict[str, Any],
    ) -> list[Array]:
        (h,) = state
        wz, wr, wh, rz, rr, rh = np.split(b, 6)
        xz, xr, xh = np.split(wx, 3)
        r_z, r_r, r_h = np.split(r, 3)
        z = f[0](np.clip(xz + r_z @ h + wz + rz, -clip, clip))
        reset = f[0](np.clip(xr + r_r @ h + wr + rr, -clip, clip))
        linear = given.get("linear_before_reset")
        new = xh + wh + (reset * (r_h @ h + rh) if linear else r_h @ (reset * h) + rh)
        return [(1 - z) * f[1](np.clip(new, -clip, clip)) + z * h]


class LSTM(Layer):
    gates = 4
    states = 2
    defaults = ("Sigmoid", "Tanh", "Tanh")

    def step(
        self,
        wx: Array,
        r: Array,
        b: Array,
        p: Array,
        state: list[Array],
        f: Functions,
        clip: float,
        given: dict[str, Any],
    ) -> list[Array]:
        h, c = state
        half = len(b) // 2
        i, o, forget, g = np.split(wx + r @ h + b[:half] + b[half:], 4)
        p_i, p_o, p_f = np.split(p, 3)
        i = f[0](np.clip(i + p_i * c, -clip, clip))
        forget = 1 - i if given.get("input_forget") else f[0](np.clip(forget + p_f * c, -clip, clip))
        c = forget * c + i * f[1](np.clip(g, -clip, clip))
        o = f[0](np.clip(o + p_o * c, -clip, clip))
        return [o * f[2](c), c]


RECURRENT: list[type[OpRun]] = [LSTM, GRU, RNN]
