"""Programs on OpenVINO, an inference engine of its own (`pip install archipel[openvino]`): it predicts and trains.

OpenVINO plans a graph for fixed shapes: a session plans for each new set of input shapes and keeps the latest plans.
It computes in float32 (its default is half precision where the processor has it), with int32 for int64, and finds fewer
wrong indices than ONNX Runtime. So a session refuses a graph that OpenVINO would answer otherwise than ONNX Runtime,
and keeps indices within the arrays. Source: docs.openvino.ai, "Inference Devices and Modes" and "Precision Control".
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from archipel.engine_registry import Refusal
from archipel.errors import RuntimeProgramError
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.delegates import NodePlacement, ProgramPlacement
from archipel.lite_runtime.engines.program_session import Arrays, ProgramSession
from archipel.lite_runtime.out_of_range import index_error

NAME = "openvino"
PLANS = 2
"""Sets of input shapes whose plans a session keeps: a training has two, full batches and the last one."""

_INEXACT = {"float64": "float32", "uint32": "int32", "uint64": "int32"}
_UNNAMED = ("Parameter", "Constant", "Result")
_TELEMETRY = "openvino_telemetry"
_INDEXED = ("Gather", "GatherElements", "ScatterElementsUpdate", "GatherND", "ScatterNDUpdate")
"""Operators with indices as their second input."""
_WRONG = "archipel.wrong_indices"
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class OpenVINOSession(ProgramSession):
    """A program in OpenVINO.

    Arguments:
        name: the program's.
        path: its graph, with its external data beside it.
        threads: the number of threads inside one operator.
        options: properties of OpenVINO as strings, and `device`, by default "CPU".
        initializers: replace those of the graph, by name.

    Raises:
        Refusal: for a graph that OpenVINO cannot run as ONNX Runtime does.
    """

    def __init__(
        self, name: str, path: Path, threads: int, options: Mapping[str, str], initializers: Arrays | None = None
    ) -> None:
        ov = import_openvino()
        self.name = name
        self._device = options.get("device", "CPU")
        self._properties = {
            "INFERENCE_PRECISION_HINT": "f32",
            "EXECUTION_MODE_HINT": "ACCURACY",
            "PERFORMANCE_HINT": "LATENCY",
            **({"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": "1"} if self._device == "CPU" else {}),
            **{key: value for key, value in options.items() if key != "device"},
        }
        _try(self._device, tuple(self._properties.items()))
        try:
            # By this name, so that nothing but an ONNX file is read, whatever the file is called or begins with.
            reader = ov.frontend.FrontEndManager().load_by_framework("onnx")
            self.native = reader.convert(reader.load(str(path)))
            _replace(ov, self.native, initializers or {})
        except error_types() as error:
            raise Refusal(_why_not_converted(error)) from None
        self.inputs = frozenset(_names(self.native.inputs))
        self.outputs = frozenset(_names(self.native.outputs))
        _check(self.native)
        self._lock = threading.Lock()
        self._plans: OrderedDict[Shapes, tuple[Any, bool]] = OrderedDict()
        self._requests: OrderedDict[Shapes, _Request] = OrderedDict()

    def run(self, outputs: Sequence[str], feed: Mapping[str, Any]) -> list[np.ndarray]:
        arrays = {name: np.asarray(value, order="C") for name, value in feed.items()}
        # One request for each set of shapes, which one thread at a time uses.
        with self._lock:
            shapes = _shapes(arrays)
            try:
                request = self._requests.get(shapes)
                if request is None:
                    request = self._requests[shapes] = self._new_request(shapes)
                    while len(self._requests) > PLANS:
                        self._requests.popitem(last=False)
                request.set(arrays)
                request()
                return [request.native.get_tensor(name).data.copy() for name in outputs]
            except error_types() as error:
                raise self._error(error) from None

    def bind(
        self, inputs: Arrays, outputs: Arrays, bound: dict[int, Any] | None = None, kept: Collection[str] = ()
    ) -> Callable[[], None]:
        try:
            with self._lock:
                request = self._new_request(_shapes(inputs))
            request.set({**inputs, **outputs})
            return request
        except error_types() as error:
            raise self._error(error) from None

    def value(self, array: np.ndarray) -> Any:
        # OpenVINO takes no array that is read-only, as those of a mapped file are.
        return array if array.flags.writeable else array.copy()

    def placement(self) -> ProgramPlacement:
        nodes = [
            NodePlacement(node.get_friendly_name(), node.get_type_name(), NAME)
            for node in self.native.get_ordered_ops()
            if node.get_type_name() not in _UNNAMED
        ]
        return ProgramPlacement(self.name, (NAME,), tuple(nodes))

    def _new_request(self, shapes: Shapes) -> _Request:
        plan, counts = self._plan(shapes)
        return _Request(plan.create_infer_request(), counts, self._error)

    def _plan(self, shapes: Shapes) -> tuple[Any, bool]:
        plan = self._plans.get(shapes)
        if plan is None:
            for name, shape in shapes:
                if 0 in shape:
                    raise RuntimeProgramError(
                        f"program {self.name!r}: {name!r} has no elements (shape {list(shape)}), and OpenVINO cannot "
                        "plan for that; give at least one example, or leave the delegate out"
                    )
            ov = import_openvino()
            model = self.native.clone()
            model.reshape({name: list(shape) for name, shape in shapes})
            counts = _count_wrong_indices(ov, model)
            plan = self._plans[shapes] = _core().compile_model(model, self._device, self._properties), counts
            while len(self._plans) > PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(shapes)
        return plan

    def _error(self, error: Exception) -> RuntimeProgramError:
        text = " ".join(str(error).split())
        where = f"program {self.name!r}"
        return index_error(where, text) or RuntimeProgramError(
            f"{where} cannot be run: OpenVINO says: {_last_words(text)}; leave the delegate out"
        )


class _Request:
    """What runs a plan. It holds the arrays that are its tensors: OpenVINO only points to their memory."""

    def __init__(self, native: Any, counts: bool, describe: Callable[[Exception], RuntimeProgramError]) -> None:
        self.native = native
        self._describe = describe
        self._arrays: Arrays = {}
        self._tensors: dict[str, Any] = {}
        self._wrong = np.zeros((), np.int32)
        if counts:
            native.set_tensor(_WRONG, import_openvino().Tensor(self._wrong, shared_memory=True))

    def set(self, arrays: Arrays) -> None:
        """Read and write these arrays, or copies of those that are read-only, which OpenVINO does not take."""
        self._arrays = {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}
        self._tensors = {
            name: import_openvino().Tensor(array, shared_memory=True) for name, array in self._arrays.items()
        }
        for name, tensor in self._tensors.items():
            self.native.set_tensor(name, tensor)

    def __call__(self) -> None:
        try:
            self.native.infer()
        except error_types() as error:
            raise self._describe(error) from None
        if self._wrong:
            raise self._describe(IndexError("invalid index found"))


def _names(ports: Sequence[Any]) -> list[str]:
    names = []
    for port in ports:
        given = sorted(port.get_names())
        if len(given) != 1:
            raise Refusal(f"two outputs are one value there: {', '.join(given) or 'without a name'}")
        names.extend(given)
    return names


def _check(model: Any) -> None:
    """Raises Refusal for what OpenVINO would compute otherwise than the graph says, without an error."""
    for node in model.get_ops():
        kind, where = node.get_type_name(), f"{node.get_type_name()} {node.get_friendly_name()!r}"
        for body in _bodies(node):
            for inner in body.get_ops():
                if inner.get_type_name() in _INDEXED:
                    raise Refusal(f"it does not check indices in the body of {where}")
            _check(body)
        if kind == "GatherND" and node.get_attributes()["batch_dims"]:
            raise Refusal(f"it does not check the indices of {where}")
        for output in node.outputs() if kind not in (*_UNNAMED, "Convert") else ():
            dtype = output.get_element_type()
            name = dtype.to_dtype().name if dtype.is_static() else ""
            if name in _INEXACT:
                raise Refusal(f"it computes {name} in {_INEXACT[name]} ({where})")


def _bodies(node: Any) -> list[Any]:
    kind = node.get_type_name()
    if kind == "If":
        return [node.get_then_body(), node.get_else_body()]
    return [node.get_function()] if kind in ("Loop", "TensorIterator") else []


def _count_wrong_indices(ov: Any, model: Any) -> bool:
    """Let the model, whose shapes are fixed, keep indices within the arrays and count those that were not (_WRONG).

    OpenVINO's kernels follow some wrong indices out of the array, and where a session has one thread the errors that
    others raise are lost. Returns False for a model without indices that are computed.
    """
    op = ov.opset13
    counts: list[Any] = []
    done: dict[tuple[str, int, bytes], Any] = {}
    for node in model.get_ops():
        limits = _limits(node)
        if limits is None or node.input_value(1).get_node().get_type_name() == "Constant":
            continue
        indices = node.input_value(1)
        key = indices.get_node().get_friendly_name(), indices.get_index(), limits.tobytes()
        if key not in done:
            dtype = indices.get_element_type().to_dtype()
            least, most = op.constant((-limits).astype(dtype)), op.constant((limits - 1).astype(dtype))
            within = op.minimum(op.maximum(indices, least), most)
            wrong = op.convert(op.not_equal(within, indices), "i32")
            axes = op.constant(np.arange(len(indices.get_shape())))
            counts.append(op.reduce_sum(wrong, axes, keep_dims=False))
            done[key] = within.output(0)
        node.input(1).replace_source_output(done[key])
    if not counts:
        return False
    result = op.result(functools.reduce(op.add, counts))
    result.output(0).set_names({_WRONG})
    model.add_results([result])
    return True


def _limits(node: Any) -> np.ndarray | None:
    """What an operator's indices must be below, one number or one for each entry of their last axis; None: has none."""
    kind = node.get_type_name()
    if kind not in _INDEXED:
        return None
    shape = np.array(node.input_value(0).get_shape())
    if kind in ("GatherND", "ScatterNDUpdate"):
        return shape[: node.input_value(1).get_shape()[-1]]
    if kind == "GatherElements":
        return shape[node.get_attributes()["axis"]]  # type: ignore[no-any-return]
    axis = node.input_value(2 if kind == "Gather" else 3).get_node()
    return shape[int(axis.get_data().item())]  # type: ignore[no-any-return]


def _replace(ov: Any, model: Any, initializers: Arrays) -> None:
    constants = {node.get_friendly_name(): node for node in model.get_ops() if node.get_type_name() == "Constant"}
    for name, array in initializers.items():
        if name not in constants:
            raise Refusal(f"initializer {name!r} cannot be replaced there")
        new = ov.opset13.constant(array)
        new.set_friendly_name(name)
        ov.utils.replace_node(constants[name], new)


def _shapes(arrays: Arrays) -> Shapes:
    return tuple((name, array.shape) for name, array in arrays.items())


_UNKNOWN = re.compile(r"No conversion rule found for operations: (.*?)(?: -- | Summary:| To facilitate|$)")
_FAILED = re.compile(r"-- (\w+)-\d+ with a message: (.*?)(?= -- \w+-\d+ with| Summary:|$)")


def _why_not_converted(error: Exception) -> str:
    text = " ".join(str(error).split())
    unknown = _UNKNOWN.search(text)
    if unknown:
        return f"it has no {unknown[1]}"
    failed = {operator: _last_words(words) for operator, words in _FAILED.findall(text)}
    # What follows from another operator's failure says so, and names no cause.
    causes = {op: words for op, words in failed.items() if "input type dynamic" not in words} or failed
    if not causes:
        return _last_words(text)
    return "it cannot convert " + "; ".join(f"{operator}: {words}" for operator, words in causes.items())


def _last_words(text: str) -> str:
    """What OpenVINO says, without the files and lines of its source that come first."""
    said = re.split(
        r"(?:failed|Exception from|While validating ONNX node) \S+ ?|(?:failed at )?\S+\.[ch]pp:\d+: ", text
    )[-1]
    return one_line(said or text)


@cache
def import_openvino() -> Any:
    """The package. Raises Refusal where it is broken."""
    # When it is imported it writes a number that identifies the user to a file in the home folder, to send it with
    # statistics of use. OpenVINO does without it, and a device says nothing about itself.
    told = sys.modules.setdefault(_TELEMETRY, None)  # type: ignore[arg-type]
    try:
        import openvino
        import openvino.frontend
        import openvino.opset13
        import openvino.utils
    except (ImportError, OSError) as error:
        raise Refusal(f"the package cannot be imported: {one_line(error)}; install it again") from None
    finally:
        if told is None:
            del sys.modules[_TELEMETRY]
    return openvino


@cache
def _core() -> Any:
    return import_openvino().Core()


@cache
def _try(device: str, properties: tuple[tuple[str, str], ...]) -> None:
    """Plan a tiny graph. Raises Refusal for a device that is not there, or properties that it does not have."""
    ov = import_openvino()
    x = ov.opset13.parameter([1], np.float32)
    try:
        _core().compile_model(ov.Model([ov.opset13.relu(x)], [x]), device, dict(properties))
    except error_types() as error:
        raise Refusal(f"device {device!r}: {_last_words(' '.join(str(error).split()))}") from None


@cache
def error_types() -> tuple[type[Exception], ...]:
    """The exceptions that OpenVINO raises; its own ones share no base class."""
    frontend = import_openvino().frontend
    own = [value for value in vars(frontend).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*own, RuntimeError, ValueError, TypeError)
