"""Weights that an exporter merged because they were equal, told apart again where they must be.

torch.onnx.export (with optimize=True, its default) keeps one of equal tensors. In a model that nobody has trained a
BatchNormalization's scale and running variance are all ones, its bias and running mean zeros, so one tensor stands for
both. As results they are equal; in training one follows gradients and the other the batches.
"""

from __future__ import annotations

import onnx_ir as ir

_ROLES = {1: "weight", 2: "bias", 3: "running_mean", 4: "running_var"}
_STATISTICS = (3, 4)


def separate_statistics(model: ir.Model) -> list[str]:
    """Give a BatchNormalization weights of its own where one tensor is a running statistic and something else, too.

    The new tensors have the names that PyTorch gives them beside `NAME.weight`. Changes `model`. Returns a note for the
    import's report, or none.
    """
    merged = {value for value in model.graph.initializers.values() if _is_merged(value)}
    kept: set[ir.Value] = set()
    made = []
    for node in [node for node in model.graph.all_nodes() if _is_batch_norm(node)]:
        scale = node.inputs[1]
        stem = str(scale.name).rpartition(".")[0] if scale is not None and scale not in kept else str(node.name)
        for place, role in _ROLES.items():
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is None or value not in merged:
                continue
            # The first layer's scale and bias keep the tensor and its name.
            if place not in _STATISTICS and value not in kept:
                kept.add(value)
                continue
            copy = _copy(model, value, f"{stem}.{role}" if stem else role)
            node.replace_input_with(place, copy)
            made.append(str(copy.name))
    if not made:
        return []
    return [
        f"equal weights of BatchNormalization that the exporter had merged are apart again: {', '.join(made)}; export "
        "an untrained PyTorch model with optimize=False, which keeps all equal weights apart"
    ]


def _copy(model: ir.Model, value: ir.Value, wanted: str) -> ir.Value:
    name, number = wanted, 1
    while name in model.graph.initializers:
        number += 1
        name = f"{wanted}.{number}"
    assert value.const_value is not None
    tensor = ir.tensor(value.const_value.numpy(), name=name)
    copy = ir.Value(name=name, type=value.type, shape=value.shape, const_value=tensor)
    model.graph.register_initializer(copy)
    return copy


def _is_merged(value: ir.Value) -> bool:
    uses = [(use.node, use.idx) for use in value.uses()]
    as_statistic = [_is_batch_norm(node) and place in _STATISTICS for node, place in uses]
    return any(as_statistic) and not all(as_statistic) and value.const_value is not None


def _is_batch_norm(node: ir.Node) -> bool:
    return node.op_type == "BatchNormalization" and node.domain == ""
