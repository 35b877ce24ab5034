from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gradient_cases.case import Case, Draw, free_axes, normal
from gradient_cases.recurrent_reference import ACTIVATIONS
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

# Per operator: gates, states, activations of a direction, and ONNX's blocks of gates in PyTorch's order.
KINDS = {"LSTM": (4, 2, 3, (0, 2, 3, 1)), "GRU": (3, 1, 2, (1, 0, 2)), "RNN": (1, 1, 1, (0,))}


def case(op_type: str) -> st.SearchStrategy[Case]:
    gates, states, per_direction, _ = KINDS[op_type]

    @st.composite
    def strategy(draw: Draw) -> Case:
        steps, batch = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        features, hidden = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        direction = draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
        directions = 2 if direction == "bidirectional" else 1
        layout = draw(st.sampled_from([0, 0, 1]))
        attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "layout": layout}
        usual = draw(st.booleans())
        if op_type == "GRU":
            attributes["linear_before_reset"] = int(usual or draw(st.booleans()))
        if not usual:
            attributes |= _unusual(draw, op_type, per_direction * directions)

        # Without bounds on the gates states grow as fast as the weights are large.
        scale = 0.4 if "activations" in attributes else 1.0

        def value(*shape: int) -> np.ndarray:
            return scale * normal(draw, *shape)

        def states_first(*shape: int) -> np.ndarray:
            found = value(*shape)
            return np.ascontiguousarray(found.swapaxes(0, 1)) if layout else found

        inputs: list[np.ndarray | None] = [
            states_first(steps, batch, features),
            value(directions, gates * hidden, features),
            value(directions, gates * hidden, hidden),
            value(directions, 2 * gates * hidden) if draw(st.booleans()) else None,
            _lengths(draw, steps, batch, usual) if draw(st.booleans()) else None,
            *(states_first(directions, batch, hidden) if draw(st.booleans()) else None for _ in range(states)),
        ]
        if op_type == "LSTM" and not usual and draw(st.booleans()):
            inputs.append(value(directions, 3 * hidden))
        while inputs[-1] is None:
            inputs.pop()
        outputs = draw(st.integers(1, 1 + states))
        of = sorted(draw(st.sets(st.integers(0, outputs - 1), min_size=1)))
        left_out = {i for i in range(outputs) if i not in of and draw(st.booleans())}
        return Case(
            op_type,
            inputs,
            attributes,
            free={0: free_axes(draw, inputs[0].shape, [0, 1])},  # type: ignore[union-attr]
            torch=_in_torch(op_type, direction, layout, of) if usual else None,
            outputs=outputs,
            of=tuple(of),
            unused=frozenset(left_out),
        )

    return strategy()


def _unusual(draw: Draw, op_type: str, count: int) -> dict[str, Any]:
    """What PyTorch does not have."""
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["clip"] = draw(st.sampled_from([0.3, 1.0]))
    if op_type == "LSTM":
        found["input_forget"] = draw(st.integers(0, 1))
    if draw(st.booleans()):
        found["activations"] = draw(st.lists(st.sampled_from(sorted(ACTIVATIONS)), min_size=count, max_size=count))
        found["activation_alpha"] = draw(st.lists(st.sampled_from([0.25, 0.5]), min_size=count, max_size=count))
        found["activation_beta"] = draw(st.lists(st.sampled_from([0.25, 0.5]), min_size=count, max_size=count))
    return found


def _lengths(draw: Draw, steps: int, batch: int, usual: bool) -> np.ndarray:
    # PyTorch packs no empty sequence.
    return np.array([draw(st.integers(int(usual), steps)) for _ in range(batch)], np.int32)


def _in_torch(op_type: str, direction: str, layout: int, of: Sequence[int]) -> Callable[..., tuple[torch.Tensor, ...]]:
    gates, states, _, order = KINDS[op_type]

    def function(
        x: torch.Tensor,
        w: torch.Tensor,
        r: torch.Tensor,
        b: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        *initial: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        if layout:
            x = x.swapaxes(0, 1)
        steps, batch, features = x.shape
        directions, _, hidden = r.shape
        if lengths is None:
            lengths = torch.full((batch,), steps)
        back = direction == "reverse"  # PyTorch's goes backwards only along with one that goes forwards

        def turned(value: torch.Tensor) -> torch.Tensor:
            rows = [torch.cat([value[:n, i].flip(0), value[n:, i]]) for i, n in enumerate(lengths.tolist())]
            return torch.stack(rows, 1) if back else value

        network = getattr(torch.nn, op_type)(
            features, hidden, bias=b is not None, bidirectional=directions == 2, dtype=x.dtype
        )
        parameters = {}
        for d, suffix in enumerate(("", "_reverse")[:directions]):
            named = {"weight_ih": w[d], "weight_hh": r[d]}
            if b is not None:
                named["bias_ih"], named["bias_hh"] = b[d].chunk(2)
            for name, value in named.items():
                blocks = value.chunk(gates)
                parameters[f"{name}_l0{suffix}"] = torch.cat([blocks[i] for i in order])
        zeros = torch.zeros(directions, batch, hidden, dtype=x.dtype)
        given = [*initial, None, None][:states]
        start = [zeros if v is None else v.swapaxes(0, 1).contiguous() if layout else v for v in given]
        packed = pack_padded_sequence(turned(x), lengths.long(), enforce_sorted=False)
        found, ends = torch.func.functional_call(
            network, parameters, (packed, tuple(start) if states > 1 else start[0])
        )
        y = turned(pad_packed_sequence(found, total_length=steps)[0]).unflatten(2, (directions, hidden))
        values = [y.swapaxes(0, 1) if layout else y.swapaxes(1, 2)]
        values += [end.swapaxes(0, 1) if layout else end for end in (ends if states > 1 else [ends])]
        return tuple(values[i] for i in of)

    return function


CASES = {("", op_type): case(op_type) for op_type in KINDS}
