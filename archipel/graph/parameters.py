"""Weights: which initializers are a model's parameters, and how they become inputs of a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir

from archipel.errors import GraphError
from archipel.graph.shapes import is_float

NAMES_KEY = "archipel.parameters"
STATE_KEY = "archipel.source_state"
FIXED_KEY = "archipel.fixed"

# Float inputs that configure an operator and are no weights, by position.
_SETTINGS: dict[str, frozenset[int]] = {
    "Resize": frozenset({1, 2}),
    "Upsample": frozenset({1}),
    "Pad": frozenset({2}),
    "Clip": frozenset({1, 2}),
    "Dropout": frozenset({1}),
    "QuantizeLinear": frozenset({1, 2}),
    "DequantizeLinear": frozenset({1, 2}),
    "NonMaxSuppression": frozenset({2, 3, 4}),
    "OneHot": frozenset({2}),
    "Range": frozenset({0, 1, 2}),
    "RoiAlign": frozenset({1}),
}


def parameter_names(model: ir.Model) -> tuple[str, ...]:
    """Names of the initializers that are parameters, in the graph's order.

    The importer records them in the model's metadata. Without a record they are the float initializers of rank 1 and
    above that an operator reads as something else than a setting (such as the scales of Resize).

    Raises GraphError for a damaged record.
    """
    recorded = model.metadata_props.get(NAMES_KEY)
    if recorded is not None:
        known = _names(recorded, "the record of the model's parameters")
        return tuple(name for name in model.graph.initializers if name in known)
    return tuple(name for name, value in model.graph.initializers.items() if _is_weight(value))


def _names(recorded: str, what: str) -> frozenset[str]:
    """A list of names in JSON. Anybody may have written the file that it stands in."""
    try:
        found = json.loads(recorded)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{what} is damaged ({error}); export the model again") from None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise GraphError(f"{what} is damaged (it is no list of names); export the model again")
    return frozenset(found)


def record_parameters(model: ir.Model, names: Iterable[str]) -> None:
    """Write into the metadata which initializers are parameters, so that constants added later do not count."""
    model.metadata_props[NAMES_KEY] = json.dumps(sorted(names))


def promote(model: ir.Model, names: Iterable[str]) -> list[ir.Value]:
    """Turn initializers into graph inputs of the same name, after the existing inputs. Changes `model`.

    Arguments:
        model: the `onnx_ir.Model` to change; the content of the initializers is dropped.
        names: initializers, in the order in which they become inputs.

    Returns the new inputs. Raises GraphError for a name that is no initializer.

    Example:
        changed = model.copy()
        inputs = promote(changed.ir, ["head.bias"])
        print(inputs[0].name, len(changed.inputs))  # head.bias 2
    """
    promoted = []
    for name in names:
        value = model.graph.initializers.pop(name, None)
        if value is None:
            raise GraphError(f"{name!r} is not an initializer of the model")
        value.const_value = None  # else a pass could fold the input as a constant
        model.graph.inputs.append(value)
        promoted.append(value)
    return promoted


def statistics(model: ir.Model) -> tuple[str, ...]:
    """Names of the initializers that are read only as running mean or variance of BatchNormalization."""
    return tuple(name for name, value in model.graph.initializers.items() if _is_running_statistic(value))


@dataclass(frozen=True)
class Fixed:
    """What a source does not train: its buffers, and the parameters that its owner has frozen."""

    buffers: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: ir.Model) -> Fixed:
        """As the model's metadata say; nothing where they do not. Raises GraphError for a damaged record."""
        recorded = model.metadata_props.get(FIXED_KEY)
        if recorded is None:
            return cls()
        try:
            fields = json.loads(recorded)
            return cls(frozenset(map(str, fields["buffers"])), frozenset(map(str, fields["frozen"])))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise GraphError(f"the record of the source's buffers is damaged ({error!r})") from None

    def record(self, model: ir.Model) -> None:
        """Write into the metadata; where nothing is fixed, there is no record."""
        model.metadata_props.pop(FIXED_KEY, None)
        if self.buffers or self.frozen:
            fields = {"buffers": sorted(self.buffers), "frozen": sorted(self.frozen)}
            model.metadata_props[FIXED_KEY] = json.dumps(fields)


def trainable_names(model: ir.Model, patterns: str | Sequence[str]) -> list[str]:
    """The parameters that match one of the globs, without running statistics and buffers of the model's source.

    "*" also leaves out what the source has frozen (`requires_grad=False`); any other glob takes it.

    Raises GraphError for another pattern that matches no parameter, or only running statistics or only
    buffers.
    """
    names, averages, fixed = parameter_names(model), set(statistics(model)), Fixed.of(model)
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        chosen = match(names, pattern)
        if pattern == "*":  # there may be nothing to train
            continue
        if chosen and averages.issuperset(chosen):
            raise GraphError(
                f"{pattern!r} matches only running statistics of BatchNormalization ({', '.join(chosen)}), which have "
                "no gradient; leave it out: batch_norm= says whether training moves them"
            )
        if chosen and fixed.buffers.issuperset(chosen):
            raise GraphError(
                f"{pattern!r} matches only buffers of the model's source ({', '.join(chosen)}), which training does "
                "not move; make an nn.Parameter of what it shall move"
            )
    everything = patterns == "*" or list(patterns) == ["*"]
    left_out = averages | fixed.buffers | (fixed.frozen if everything else set())
    return [name for name in match(names, patterns) if name not in left_out]


def match(names: Sequence[str], patterns: str | Sequence[str]) -> list[str]:
    """The names that match one of the globs. Raises GraphError for a pattern that matches none."""
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in wanted:
        if names and not any(_matches(name, pattern) for name in names):
            raise GraphError(f"no parameter matches {pattern!r}; there are: {', '.join(names)}")
    return [name for name in names if any(_matches(name, pattern) for pattern in wanted)]


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)  # a name may contain brackets, which a glob would interpret


def _is_running_statistic(value: ir.Value) -> bool:
    uses = list(value.uses())
    return bool(uses) and all(
        use.node.domain == "" and use.node.op_type == "BatchNormalization" and use.idx in (3, 4) for use in uses
    )


def _is_weight(value: ir.Value) -> bool:
    if not is_float(value) or value.shape is None or len(value.shape) == 0:
        return False
    uses = list(value.uses())
    return any(use.idx not in _SETTINGS.get(use.node.op_type, ()) for use in uses)
