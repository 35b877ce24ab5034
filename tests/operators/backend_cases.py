"""The ONNX package's own node tests as a source of gradients to check: which qualify, and what comes out for each.

A case qualifies if it is one standard node with floating-point inputs and outputs. It is brought to float64 where its
operator has that, moved a little off the kinks that round numbers sit on, imported and differentiated; a random
projection of its outputs is then compared with central finite differences of the original on onnx.reference.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import onnx
from gradient_cases.reference import evaluator
from onnx import TensorProto, defs, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from archipel import Model
from archipel.autodiff import RULES, vjp
from archipel.errors import GraphError, MissingRuleError, ModelImportError, NotDifferentiableError
from archipel.graph.opset import OPSET

FLOATS = {TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16}
SINGLE = {TensorProto.FLOAT, TensorProto.FLOAT16}
JITTER = 1e-3
NAMES_A_TYPE = {"to", "dtype", "output_datatype", "output_dtype"}
CONSTANTS = "with its integer inputs as constants"


@dataclass(frozen=True)
class Result:
    """What became of a case: "passed", "refused" or "failed", and why. `second`: why the gradient has none, if so."""

    name: str
    op_type: str
    status: str
    reason: str = ""
    second: str = ""


@cache
def node_tests() -> tuple[TestCase, ...]:
    """All of the package's node tests; random data is the same in every run."""
    np.random.seed(0)  # the package's generators draw from it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tuple(load_model_tests(kind="node"))


def qualifying() -> Iterator[TestCase]:
    for case in node_tests():
        graph = case.model.graph
        if (
            len(graph.node) == 1
            and graph.node[0].domain == ""
            and not case.name.endswith("_expanded")
            and any(_kind(value) in FLOATS for value in graph.input)
            and any(_kind(value) in FLOATS for value in graph.output)
            and all(value.type.WhichOneof("value") == "tensor_type" for value in (*graph.input, *graph.output))
        ):
            yield case


def check(case: TestCase) -> Result:
    """Differentiate one case and compare; if it is refused, once more with its integer inputs as constants."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # onnx.reference computes with infinities
        return _check(case)


def _check(case: TestCase) -> Result:
    given = [numpy_helper.to_array(a) if isinstance(a, TensorProto) else np.asarray(a) for a in case.data_sets[0][0]]
    result = _attempt(case, in_double(case.model), given)
    settings = {v.name: a for v, a in zip(case.model.graph.input, given) if _kind(v) not in FLOATS}
    if result.status == "refused" and settings:
        again = _attempt(case, in_double(with_constants(case.model, settings)), given)
        if again.status != "refused":
            return replace(again, reason=again.reason or CONSTANTS)
    return result


def _attempt(case: TestCase, proto: onnx.ModelProto, given: Sequence[np.ndarray]) -> Result:
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    op_type = proto.graph.node[0].op_type
    of = [value.name for value in proto.graph.output if _kind(value) in FLOATS]
    wrt = [value.name for value in proto.graph.input if _kind(value) in FLOATS]
    try:
        model = Model.from_proto(proto)
        gradients, wrt = differentiable(model, of, wrt)
        forward = _Forward(proto, model, of)
        feed = forward.inputs(dict(zip((value.name for value in case.model.graph.input), given)), rng)
        exact = not any(_kind(v) in SINGLE for v in (*proto.graph.input, *proto.graph.output) if v.name in of + wrt)
        worst = compare(forward, gradients, wrt, feed, rng, exact)
        second = second_derivative(forward, gradients, wrt, feed, rng)
    except (ModelImportError, MissingRuleError, NotDifferentiableError) as error:
        return Result(case.name, op_type, "refused", _short(error))
    except Exception as error:  # noqa: BLE001  (whatever it is, it belongs in the table)
        if isinstance(error, GraphError) and ("", op_type) not in RULES:
            return Result(case.name, op_type, "refused", _short(error))
        return Result(case.name, op_type, "failed", f"{type(error).__name__}: {_short(error)}")
    if not worst < (1e-5 if exact else 2e-2):
        return Result(case.name, op_type, "failed", f"differs from finite differences by {worst:.1e}")
    return Result(case.name, op_type, "passed", second=second)


def differentiable(model: Model, of: Sequence[str], wrt: Sequence[str]) -> tuple[Model, list[str]]:
    """The gradient with respect to as many of `wrt` as have one, and which those are.

    Raises NotDifferentiableError if none has one.
    """
    try:
        return vjp(model, of, wrt), list(wrt)
    except NotDifferentiableError:
        if len(wrt) == 1:
            raise
    found = []
    for name in wrt:
        try:
            vjp(model, of, [name])
            found.append(name)
        except NotDifferentiableError:
            continue
    return vjp(model, of, found or wrt), found


class _Forward:
    """The case as it is, on onnx.reference; the model imported from it where onnx.reference lacks the operator."""

    def __init__(self, proto: onnx.ModelProto, model: Model, of: Sequence[str]) -> None:
        self.of = list(of)
        self._inputs = {value.name: _kind(value) for value in proto.graph.input}
        self._ways: list[Callable[[], ReferenceEvaluator]] = [
            lambda: evaluator(model.to_bytes()), lambda: ReferenceEvaluator(proto), lambda: evaluator(proto)
        ]  # fmt: skip

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        try:
            return [np.asarray(y) for y in self._way().run(self.of, feed)]
        except Exception:
            if len(self._ways) == 1:
                raise
            self._ways.pop()
            return self.run(feed)

    def _way(self) -> ReferenceEvaluator:
        made = self._ways[-1]()
        self._ways[-1] = lambda: made
        return made

    def inputs(self, given: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Near what is given, off the kinks, and where no output is NaN."""
        feed = {name: given[name] for name in self._inputs}
        double = [name for name, kind in self._inputs.items() if kind == TensorProto.DOUBLE]
        for name in self._inputs:
            if feed[name].dtype.kind == "f":
                feed[name] = np.where(np.isnan(feed[name]), feed[name].dtype.type(1), feed[name])
        for name in double:
            feed[name] = feed[name].astype(np.float64) + JITTER * rng.standard_normal(feed[name].shape)
        if any(np.isnan(y).any() for y in self.run(feed)):
            feed |= {name: np.abs(feed[name]) + 0.1 for name in double}
        return feed


def compare(
    forward: _Forward,
    gradients: Model,
    wrt: Sequence[str],
    feed: dict[str, np.ndarray],
    rng: np.random.Generator,
    exact: bool,
) -> float:
    """The largest relative difference between the gradients and central differences along random directions.

    Where an input or an output is infinite, as masks are, there is no direction to go and nothing to compare.
    """
    seeds = [_like(value, rng) for value in forward.run(feed)]
    names = [port.name for port in gradients.outputs[-len(wrt) :]]
    cotangents = {f"{name}.cotangent": seed for name, seed in zip(forward.of, seeds)}
    found = evaluator(gradients.to_bytes()).run(names, {**_known(gradients, feed), **cotangents})
    worst = 0.0
    for name, gradient in zip(wrt, found):
        if np.shape(gradient) != feed[name].shape:
            return float("inf")
        if gradient.size == 0:
            continue
        direction = _like(feed[name], rng)
        gradient = np.where(np.isfinite(feed[name]), gradient, 0)
        half = any(array.dtype == np.float16 for array in (direction, *seeds))
        step = 1e-6 if exact else 2.0**-5 if half else 2.0**-9
        ends = []
        for sign in (1, -1):
            values = forward.run({**feed, name: np.asarray(feed[name] + direction.dtype.type(sign * step) * direction)})
            ends.append(
                sum(np.sum(y[seed != 0].astype(np.float64) * seed[seed != 0]) for y, seed in zip(values, seeds))
            )
        expected = (ends[0] - ends[1]) / (2 * step)
        scale = max(float(np.linalg.norm(gradient) * np.linalg.norm(direction)), abs(float(expected)), 1e-3)
        difference = float(abs(np.sum(gradient * direction) - expected) / scale)
        worst = max(worst, difference) if np.isfinite(difference) else float("inf")
    return worst


def second_derivative(
    forward: _Forward, gradients: Model, wrt: Sequence[str], feed: dict[str, np.ndarray], rng: np.random.Generator
) -> str:
    """Why the gradient cannot be differentiated again, or how wrong that comes out; "" if it is right."""
    if any(feed[name].size == 0 for name in wrt):
        return ""
    outputs = [f"{name}.grad" for name in wrt]
    try:
        again, names = differentiable(gradients, outputs, [*wrt, *(f"{name}.cotangent" for name in forward.of)])
    except NotDifferentiableError:
        return ""
    except MissingRuleError as error:
        return _short(error)
    cotangents = {f"{name}.cotangent": _like(y, rng) for name, y in zip(forward.of, forward.run(feed))}
    first = _Forward(onnx.ModelProto.FromString(gradients.to_bytes()), gradients, outputs)
    inner = (value.dtype for node in gradients.ir.graph.all_nodes() for value in node.outputs)
    exact = not any(dtype is not None and int(dtype) in SINGLE for dtype in inner)
    worst = compare(first, again, names, {**_known(gradients, feed), **cotangents}, rng, exact)
    return "" if worst < (1e-4 if exact else 5e-2) else f"differs from finite differences by {worst:.1e}"


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its floating-point types made float64, as far as its operator has that type for them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    (node,) = copy.graph.node
    if any(attribute.HasField("g") or attribute.name in NAMES_A_TYPE for attribute in node.attribute):
        return copy
    ports = {value.name: value for value in (*copy.graph.input, *copy.graph.output)}
    version = copy.opset_import[0].version
    newer = not defs.has(node.op_type, OPSET, "")
    schema = defs.get_schema(node.op_type, version if newer else min(version, OPSET), "")
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        for index, name in enumerate(names):
            allowed = formal[min(index, len(formal) - 1)].types
            if name in ports and _kind(ports[name]) in FLOATS and "tensor(double)" in allowed:
                ports[name].type.tensor_type.elem_type = TensorProto.DOUBLE
    return copy


def with_constants(model: onnx.ModelProto, values: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model with these inputs fixed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [value for value in copy.graph.input if value.name not in values]
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    return copy


def _known(model: Model, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {port.name for port in model.inputs}
    return {name: value for name, value in feed.items() if name in names}


def _like(value: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.where(np.isfinite(value), rng.standard_normal(value.shape), 0).astype(value.dtype)


def _kind(value: onnx.ValueInfoProto) -> int:
    return int(value.type.tensor_type.elem_type)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
