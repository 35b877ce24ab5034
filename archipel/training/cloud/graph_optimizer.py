"""An optimizer that PyTorch does not have: its own graph, lowered to PyTorch once for each shape of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.passes import optimize
from archipel.training.context import Anchor
from archipel.training.optimizers import Optimizer

_TYPES = {torch.float32: ir.DataType.FLOAT, torch.float64: ir.DataType.DOUBLE}


class GraphOptimizer(torch.optim.Optimizer):
    """Runs `optimizer.update` for each parameter, with its hyperparameters' defaults and its own schedule.

    The `lr` of its group is for whoever asks for the present rate: nothing here reads it.

    Arguments:
        optimizer: of the protocol `training.optimizers.Optimizer`.
        parameters: what it trains, float32 or float64.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._updates: dict[tuple[Any, ...], Callable[..., Any]] = {}
        super().__init__(parameters, {"lr": 0.0, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        specs = self._optimizer.init()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for spec in specs:
                    if spec.name not in state:
                        state[spec.name] = torch.full_like(parameter, spec.init)
                scalars = [
                    torch.tensor(spec.default, dtype=torch.float32, device=parameter.device)
                    for spec in self._optimizer.hyperparameters
                ]
                step = torch.tensor(group["step"], device=parameter.device)
                kept = [state[spec.name] for spec in specs]
                results = self._update(parameter)(parameter.detach(), parameter.grad, step, *scalars, *kept)
                new, *states = results if isinstance(results, tuple) else (results,)
                parameter.copy_(new)
                for spec, value in zip(specs, states, strict=True):
                    # A graph may hand an input on as it is: the state must not share memory with a parameter.
                    state[spec.name] = value.clone() if value is kept[specs.index(spec)] else value
            group["step"] += 1

    def _update(self, parameter: nn.Parameter) -> Callable[..., Any]:
        key = (parameter.device, parameter.dtype, tuple(parameter.shape))
        if key not in self._updates:
            self._updates[key] = self._lower(parameter).to(parameter.device)
        return self._updates[key]

    def _lower(self, parameter: nn.Parameter) -> nn.Module:
        from archipel.training.cloud.graphs.torch_module import TorchModule

        if parameter.dtype not in _TYPES:
            raise TrainingError(f"optimizer: parameters must be float32 or float64, got {parameter.dtype}")
        dtype, shape = _TYPES[parameter.dtype], list(parameter.shape)
        op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="update"))
        value, gradient = op.input("parameter", dtype, shape), op.input("gradient", dtype, shape)
        step = op.input("step", ir.DataType.INT64, [])
        scalars = {s.name: op.input(s.name, ir.DataType.FLOAT, []) for s in self._optimizer.hyperparameters}
        state = {s.name: op.input(f"state.{s.name}", dtype, shape) for s in self._optimizer.init()}
        updated = self._optimizer.update(op, value, gradient, state, _Context(scalars, step))
        op.name_output(updated.parameter, "parameter.next")
        for spec in self._optimizer.init():
            op.name_output(updated.state[spec.name], f"state.{spec.name}.next")
        model = ir.Model(op.graph, ir_version=IR_VERSION)
        optimize(model)
        return TorchModule(Model(model))


@dataclass
class _Context:
    hyperparameters: Mapping[str, ir.Value]
    number: ir.Value

    def step(self) -> ir.Value:
        return self.number

    def state(self, parameter: ir.Value, name: str) -> ir.Value:
        raise TrainingError(f"optimizer: it reads the round state {name!r}, which only a federation's rounds have")

    def anchor(self, parameter: ir.Value, kind: Anchor) -> ir.Value:
        raise TrainingError(f"optimizer: it reads the {kind} value, which only a federation's rounds have")
