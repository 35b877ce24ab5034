"""Recurrent layers step by step, for what PyTorch's own do not have.

That is: `clip`, activation functions other than the default ones, peepholes, `input_forget`, a GRU that resets before
its product, and the state c of an LSTM whose sequences end early.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from archipel.errors import TrainingError
from archipel.training.cloud.ops.context import NodeContext

DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
"""The activation functions of each operator."""

Named = tuple[str, float, float]
"""An activation function: its name in lower case, alpha and beta."""

# name -> function of x, alpha and beta, and the defaults of those that it takes.
_FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor, float, float], torch.Tensor], tuple[float, ...]]] = {
    "sigmoid": (lambda x, a, b: torch.sigmoid(x), ()),
    "tanh": (lambda x, a, b: torch.tanh(x), ()),
    "relu": (lambda x, a, b: torch.relu(x), ()),
    "affine": (lambda x, a, b: a * x + b, (1.0, 0.0)),
    "leakyrelu": (lambda x, a, b: functional.leaky_relu(x, a), (0.01,)),
    "thresholdedrelu": (lambda x, a, b: torch.where(x > a, x, 0.0), (1.0,)),
    "scaledtanh": (lambda x, a, b: a * torch.tanh(b * x), (1.0, 1.0)),
    "hardsigmoid": (lambda x, a, b: torch.clamp(a * x + b, 0.0, 1.0), (0.2, 0.5)),
    "elu": (lambda x, a, b: functional.elu(x, a), (1.0,)),
    "softsign": (lambda x, a, b: functional.softsign(x), ()),
    "softplus": (lambda x, a, b: torch.logaddexp(x, torch.zeros_like(x)), ()),
}

_Apply = Callable[[int, torch.Tensor], torch.Tensor]


def parse_activations(ctx: NodeContext, directions: int) -> list[Named]:
    """The activation functions of a recurrent node, of all directions one after the other.

    A function with parameters takes the next ones of `activation_alpha` and `activation_beta` (ONNX LSTM-14). Raises
    TrainingError for an unknown function or another number of them.
    """
    expected = list(DEFAULTS[ctx.node.op_type]) * directions
    names = [name.lower() for name in ctx.texts("activations", expected)]
    if len(names) != len(expected) or not set(names) <= set(_FUNCTIONS):
        raise TrainingError(
            f"{ctx.node.op_type} {ctx.node.name!r} has activations {names}; expected {len(expected)} of "
            f"{', '.join(sorted(_FUNCTIONS))}"
        )
    lists = []
    for name in ("activation_alpha", "activation_beta"):
        attribute = ctx.node.attributes.get(name)
        lists.append([] if attribute is None else [float(number) for number in attribute.as_floats()])
    alphas, betas = map(iter, lists)
    found: list[Named] = []
    for name in names:
        _, defaults = _FUNCTIONS[name]
        alpha = next(alphas, defaults[0]) if defaults else 0.0
        found.append((name, alpha, next(betas, defaults[1]) if len(defaults) > 1 else 0.0))
    return found


def run_loop(
    op_type: str,
    activations: Sequence[Named],
    clip: float | None,
    flag: int,
    direction: str,
    layout: int,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    b: torch.Tensor | None,
    lengths: torch.Tensor | None,
    initial: Sequence[torch.Tensor | None],
    peepholes: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Y and the final states, in the shapes of the operator. `flag`: `linear_before_reset` or `input_forget`."""
    x = x.transpose(0, 1) if layout else x
    hidden, per_direction = r.size(2), len(DEFAULTS[op_type])
    outputs, finals = [], []
    for d in range(r.size(0)):
        own = activations[d * per_direction : (d + 1) * per_direction]

        def apply(index: int, value: torch.Tensor, own: Sequence[Named] = own) -> torch.Tensor:
            if clip is not None and index < 2:  # the gates; the state of an LSTM is not cut off
                value = torch.clamp(value, -clip, clip)
            name, alpha, beta = own[index]
            return _FUNCTIONS[name][0](value, alpha, beta)

        states = [
            x.new_zeros(x.size(1), hidden) if given is None else given[:, d] if layout else given[d]
            for given in initial
        ]
        bias = None if b is None else b[d].chunk(2)
        projected = torch.matmul(x, w[d].t())
        projected = projected if bias is None else projected + bias[0]
        parts: list[torch.Tensor] = [x] * x.size(0)
        backwards = direction == "reverse" or d == 1
        for t in reversed(range(x.size(0))) if backwards else range(x.size(0)):
            peephole = None if peepholes is None else peepholes[d]
            new = _STEPS[op_type](projected[t], r[d], None if bias is None else bias[1], states, apply, flag, peephole)
            if lengths is None:
                states, parts[t] = new, new[0]
            else:
                inside = (t < lengths)[:, None]
                states = [torch.where(inside, after, before) for after, before in zip(new, states)]
                parts[t] = torch.where(inside, new[0], 0.0)
        if lengths is not None:  # an empty sequence ends with zeros
            states = [torch.where((lengths > 0)[:, None], state, 0.0) for state in states]
        outputs.append(torch.stack(parts))
        finals.append(states)
    y = torch.stack(outputs, 1)
    ends = [torch.stack(each, 1 if layout else 0) for each in zip(*finals)]
    return y.permute(2, 0, 1, 3) if layout else y, *ends


def _lstm(
    wx: torch.Tensor,
    r: torch.Tensor,
    bias: torch.Tensor | None,
    states: list[torch.Tensor],
    f: _Apply,
    coupled: int,
    peephole: torch.Tensor | None,
) -> list[torch.Tensor]:
    h, c = states
    i, o, forget, g = functional.linear(h, r, bias).add(wx).chunk(4, -1)
    p_i, p_o, p_f = (0.0, 0.0, 0.0) if peephole is None else peephole.chunk(3)
    i = f(0, i + p_i * c)
    forget = 1 - i if coupled else f(0, forget + p_f * c)
    c = forget * c + i * f(1, g)
    return [f(0, o + p_o * c) * f(2, c), c]


def _gru(
    wx: torch.Tensor,
    r: torch.Tensor,
    bias: torch.Tensor | None,
    states: list[torch.Tensor],
    f: _Apply,
    linear: int,
    peephole: torch.Tensor | None,
) -> list[torch.Tensor]:
    (h,) = states
    x_z, x_r, x_h = wx.chunk(3, -1)
    r_z, r_r, r_h = r.chunk(3)
    b_z, b_r, b_h = (None, None, None) if bias is None else bias.chunk(3)
    z = f(0, x_z + functional.linear(h, r_z, b_z))
    reset = f(0, x_r + functional.linear(h, r_r, b_r))
    new = reset * functional.linear(h, r_h, b_h) if linear else functional.linear(reset * h, r_h, b_h)
    return [(1 - z) * f(1, x_h + new) + z * h]


def _rnn(
    wx: torch.Tensor,
    r: torch.Tensor,
    bias: torch.Tensor | None,
    states: list[torch.Tensor],
    f: _Apply,
    flag: int,
    peephole: torch.Tensor | None,
) -> list[torch.Tensor]:
    return [f(0, wx + functional.linear(states[0], r, bias))]


_STEPS: dict[str, Callable[..., list[torch.Tensor]]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
