"""The optimizers of `archipel.training.optimizers` on PyTorch, with the meaning that they have in a step graph.

Those that `torch.optim` has run there, fused where PyTorch can; any other runs its own graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from archipel.graph.build import Builder
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.training.optimizers import SGD, Adagrad, Adam, Descent, Optimizer, RMSprop
from archipel.training.schedules import Schedule

if TYPE_CHECKING:
    import torch
    from torch import nn

_CHUNK = 1024
Decay = Literal["all", "matrices"]


class Rates:
    """The learning rate of each update: `lr` times the factor of the schedule's own graph, in float32 as on a device.

    Arguments:
        optimizer: its `lr` is a number or a schedule.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        defaults = {spec.name: spec.default for spec in optimizer.hyperparameters}
        lr = optimizer.lr if isinstance(optimizer, Descent) else defaults.get("lr", 0.0)
        self._schedule = lr if isinstance(lr, Schedule) else None
        self._base = np.float32(lr.base if isinstance(lr, Schedule) else lr)
        self._factors: dict[int, NDArray[np.float32]] = {}
        self._session: Any = None

    def at(self, step: int) -> float:
        """The rate of update number `step`, from 0."""
        if self._schedule is None:
            return float(self._base)
        chunk = step // _CHUNK
        if chunk not in self._factors:
            self._factors = {chunk: self._compute(chunk)}
        return float(self._base * self._factors[chunk][step % _CHUNK])

    def _compute(self, chunk: int) -> NDArray[np.float32]:
        """Many steps in one run: a schedule is made of element-wise operators, which take vectors too."""
        import onnxruntime

        assert self._schedule is not None
        if self._session is None:
            op = Builder(ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="schedule"))
            time = op.input("step", ir.DataType.INT64, ["steps"])
            op.name_output(self._schedule.factor(op, time), "factor")
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            graph = ir.to_proto(ir.Model(op.graph, ir_version=IR_VERSION)).SerializeToString()
            self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        steps = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
        (factors,) = self._session.run(None, {name.name: steps for name in self._session.get_inputs()})
        return np.broadcast_to(factors, steps.shape)


def make_torch_optimizer(
    optimizer: Optimizer, parameters: Iterable[nn.Parameter], decay: Decay, device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer of PyTorch for these parameters, whose rate `Rates` sets before every update.

    Arguments:
        optimizer: one of training.optimizers, or one written like them.
        parameters: what it trains.
        decay: "matrices" spares parameters of fewer than two axes.
        device: where the parameters are.
    """
    import torch

    trained, kinds = list(parameters), (torch.float32, torch.float64)
    # PyTorch has fused kernels for these devices; the sums that they make are the same.
    plain = not any(hasattr(p, "placements") for p in trained)  # and no parts of parameters (DTensor)
    fused = plain and device.type in ("cpu", "cuda") and all(p.dtype in kinds for p in trained)
    rate = Rates(optimizer).at(0)
    kind = type(optimizer)  # by type: a subclass may compute something else
    if kind is SGD:
        assert isinstance(optimizer, SGD)
        return torch.optim.SGD(
            _groups(trained, optimizer.weight_decay, decay), lr=rate, momentum=optimizer.momentum,
            dampening=optimizer.dampening, nesterov=optimizer.nesterov, fused=fused,
        )  # fmt: skip
    if kind is Adam:
        assert isinstance(optimizer, Adam)
        make = torch.optim.AdamW if optimizer.decoupled else torch.optim.Adam
        return make(
            _groups(trained, optimizer.weight_decay, decay), lr=rate, betas=optimizer.betas, eps=optimizer.eps,
            amsgrad=optimizer.amsgrad, fused=fused,
        )  # fmt: skip
    if kind is Adagrad:
        assert isinstance(optimizer, Adagrad)
        return torch.optim.Adagrad(
            _groups(trained, optimizer.weight_decay, decay), lr=rate, lr_decay=optimizer.lr_decay, eps=optimizer.eps,
            initial_accumulator_value=optimizer.initial_accumulator_value, fused=fused and device.type == "cpu",
        )  # fmt: skip
    if kind is RMSprop:
        assert isinstance(optimizer, RMSprop)
        return torch.optim.RMSprop(
            _groups(trained, optimizer.weight_decay, decay), lr=rate, alpha=optimizer.alpha, eps=optimizer.eps,
            momentum=optimizer.momentum, centered=optimizer.centered,
        )  # fmt: skip
    from archipel.training.cloud.graph_optimizer import GraphOptimizer

    return GraphOptimizer(optimizer, trained)


def _groups(parameters: Sequence[nn.Parameter], weight_decay: float, decay: Decay) -> list[dict[str, Any]]:
    if decay == "all" or not weight_decay:
        return [{"params": list(parameters), "weight_decay": weight_decay}]
    matrices = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
