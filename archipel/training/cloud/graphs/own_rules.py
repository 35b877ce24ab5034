"""Functions that have a gradient rule of their own (`autodiff.rule`): PyTorch goes by the rule, too."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from archipel.autodiff import RULES, vjp
from archipel.graph.functions import inline_functions
from archipel.graph.model import Model
from archipel.training.cloud.ops import LOWERINGS


def has_own_rule(domain: str, op_type: str) -> bool:
    """Whether nodes of a function are to follow its rule, and not the derivative of its body."""
    return (domain, op_type) in RULES and (domain, op_type) not in LOWERINGS


class OwnRule(nn.Module):
    """A call of such a function: its body forwards, and its rule as a graph of its own backwards."""

    def __init__(self, model: Model, node: ir.Node) -> None:
        """model: the one whose functions the node calls."""
        from archipel.training.cloud.graphs.torch_module import TorchModule

        super().__init__()
        call = _call(model, node)
        floats = [info.name for info in call.inputs if "float" in info.dtype]
        self.results = [info.name for info in call.outputs]
        self.differentiable = ["float" in info.dtype for info in call.outputs]
        self.names = [info.name for info in call.inputs]
        of = [name for name, is_float in zip(self.results, self.differentiable) if is_float]
        # The functions' bodies in both: a call in the graph of the rule would ask for that graph again.
        self.body = TorchModule(_inlined(call))
        self.rule = TorchModule(_inlined(vjp(call, of=of, wrt=floats))) if of and floats else None
        self.reached = floats

    def forward(self, *inputs: torch.Tensor) -> Any:
        found = _Call.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return found if len(self.results) > 1 else found[0]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: OwnRule, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.module = module
        ctx.save_for_backward(*inputs)
        found = module.body(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        # An output that is an input is another tensor: one that hands its gradient on by the rule.
        results = tuple(each.clone() if any(each is x for x in inputs) else each for each in found)
        ctx.mark_non_differentiable(*(y for y, is_float in zip(results, module.differentiable) if not is_float))
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module: OwnRule = ctx.module
        if module.rule is None:
            return (None,) * (1 + len(module.names))
        given = dict(zip(module.names, ctx.saved_tensors))
        given |= {f"{name}.cotangent": value for name, value in zip(module.results, cotangents)}
        found = module.rule(*(given[name] for name in module.rule.input_names))
        names = [info.name for info in module.rule.source.outputs]
        gradients = dict(zip(names, found if isinstance(found, tuple) else (found,)))
        return (None, *(gradients.get(f"{name}.grad") for name in module.names))


def _call(model: Model, node: ir.Node) -> Model:
    """A model of the one node."""
    inputs: list[ir.Value | None] = [
        None if value is None else _like(value, f"x{i}") for i, value in enumerate(node.inputs)
    ]
    outputs = [_like(value, f"y{i}") for i, value in enumerate(node.outputs)]
    alone = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), overload=node.overload, outputs=outputs,
        name="call",
    )  # fmt: skip
    imports = dict(model.ir.opset_imports)
    graph = ir.Graph(
        [value for value in inputs if value is not None], outputs, nodes=[alone], opset_imports=imports, name="call"
    )
    functions = list(model.copy().ir.functions.values())
    return Model(ir.Model(graph, ir_version=model.ir.ir_version, functions=functions))


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=value.shape)


def _inlined(model: Model) -> Model:
    model = model.copy()
    inline_functions(model.ir, keep=LOWERINGS)
    return model
