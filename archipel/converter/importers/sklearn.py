"""scikit-learn estimators to Model: skl2onnx converts, ai.onnx.ml operators become standard, answers are compared."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common

from archipel.converter.importers.answers import compare
from archipel.converter.importers.ml_operators import rewrite
from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph.batch import BATCH
from archipel.graph.build import Builder
from archipel.graph.importing.cleaning import clean
from archipel.graph.importing.comparison import TOLERANCE, CannotRunError
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.parameters import record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.graph.report import ImportReport
from archipel.graph.shapes import dims, is_float, rank
from archipel.graph.walk import trace_back
from archipel.importer_registry import IMPORTERS

INPUT = "input"
_CLASSICAL_OPSET = 3  # of ai.onnx.ml
_SAMPLES = 256
_LAYERS = ("Gemm", "MatMul")
_SMALLEST = 1e-30


@IMPORTERS.register("sklearn")
def from_sklearn(estimator: Any, example: Any) -> Model:
    """See `Model.from_sklearn`."""
    try:
        import skl2onnx  # noqa: F401
        import sklearn
    except ModuleNotFoundError as error:
        raise MissingExtraError((error.name or "skl2onnx").partition(".")[0], "sklearn") from None
    name = type(estimator).__name__
    rows = _rows(example, name)
    expected = _answers(estimator, rows, name)
    proto = _convert(estimator, rows.shape[1], name)
    imported = _standard(proto, estimator, name)
    try:
        feeds, given = [{INPUT: x} for x, _ in expected], [[answer] for _, answer in expected]
        # Only the last output: a classifier's logits, the output before, are no answer of scikit-learn.
        apart = compare(imported, feeds, given, slice(-1, None))
    except CannotRunError as error:
        raise ModelImportError(f"{name}: ONNX Runtime cannot run the import: {error}") from None
    if not apart <= TOLERANCE:
        raise ModelImportError(
            f"{name}: the import differs from the estimator by {apart:.2g} of its largest answer on the example and "
            f"numbers like it; {TOLERANCE:g} is allowed"
        )
    report = ImportReport(f"scikit-learn {sklearn.__version__} ({name})", deviation=apart, samples=len(expected))
    classes = getattr(estimator, "classes_", None)
    if classes is not None:
        report = report.with_notes(f"classes, in the order of the outputs: {', '.join(map(str, classes))}")
    report.record(imported.ir)
    return imported


def _rows(example: Any, name: str) -> np.ndarray:
    try:
        rows = np.asarray(example, np.float32)
    except (TypeError, ValueError) as error:
        raise ModelImportError(f"{name}: example must be numbers, [examples, features]: {error}") from None
    if rows.ndim != 2 or 0 in rows.shape:
        raise ModelImportError(f"{name}: example must be [examples, features], has shape {list(rows.shape)}")
    return rows[:_SAMPLES]


def _answers(estimator: Any, rows: np.ndarray, name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs (the example, and noise of its spread) with the estimator's answers, [n, classes] or [n, targets]."""
    method = next(
        (m for m in ("predict_proba", "decision_function", "predict", "transform") if hasattr(estimator, m)), None
    )
    if method is None:
        raise ModelImportError(f"{name} has neither predict nor transform; pass a fitted estimator or pipeline")
    rng = np.random.default_rng(0)
    spread = np.where(np.isfinite(rows), rows, 0).std(0)
    # Noise is added to rows of the example, so that inputs stay near the range that the estimator is for.
    noise = rows[rng.integers(0, len(rows), _SAMPLES)] + spread * rng.standard_normal((_SAMPLES, rows.shape[1]))
    pairs = []
    for x in (rows, noise.astype(np.float32)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the example has no feature names
            try:
                answer = np.asarray(getattr(estimator, method)(x))
            except Exception as error:
                # An estimator is anybody's class.
                raise ModelImportError(f"{name}.{method} fails on the example: {error}") from error
        if answer.dtype.kind not in "fiu" or answer.ndim > 2:
            raise ModelImportError(
                f"{name}.{method} answers {answer.dtype} {list(answer.shape)}; only numbers can be imported"
            )
        if answer.ndim == 1:
            # One score for two classes is that of the second; the import gives the first a 0.
            answer = np.stack([np.zeros_like(answer), answer], 1) if method == "decision_function" else answer[:, None]
        pairs.append((x, answer))
    return pairs


def _convert(estimator: Any, features: int, name: str) -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import FloatTensorType

    last = estimator.steps[-1][1] if hasattr(estimator, "steps") else estimator
    # Without zipmap=False a classifier's output is a list of dictionaries. Estimators that refuse it need no option.
    proto: onnx.ModelProto | None = None
    problem = ""
    choices: list[dict[int, dict[str, bool]]] = [{id(last): {"zipmap": False}}, {id(last): {}}]
    for options in choices:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                proto = to_onnx(
                    estimator,
                    initial_types=[(INPUT, FloatTensorType([None, features]))],
                    options=options,
                    target_opset={"": OPSET, "ai.onnx.ml": _CLASSICAL_OPSET},
                )
            break
        except NameError as error:  # skl2onnx's way to say that it does not know the option
            problem = str(error)
        except Exception as error:
            # skl2onnx's converters are plugins, and raise anything.
            raise ModelImportError(
                f"{name}: skl2onnx cannot convert it: {_first_line(error)}; fit it, or use an estimator of "
                "skl2onnx.supported_converters()"
            ) from error
    if proto is None:
        raise ModelImportError(f"{name}: skl2onnx cannot convert it: {problem}")
    return proto


def _standard(proto: onnx.ModelProto, estimator: Any, name: str) -> Model:
    """The same in standard operators, with the outputs that `Model.from_sklearn` describes."""
    model = ir.from_proto(proto)
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    if "probabilities" in outputs:
        # The label is dropped: the index of the largest probability says the same, and devices have no text outputs.
        graph.outputs[:] = [outputs["probabilities"]]
    remove_dead_code(model)
    graph.inputs[0].shape = ir.Shape([BATCH, *(d for d in graph.inputs[0].shape[1:])])  # type: ignore[index]
    common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(model)
    op = Builder(graph)
    rewrite(op, name)
    remove_dead_code(model)
    graph.opset_imports.clear()  # nothing of ai.onnx.ml is left
    graph.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    if len(graph.outputs) != 1:
        raise ModelImportError(f"{name} has {len(graph.outputs)} outputs; one is expected")
    _name_outputs(op, hasattr(estimator, "classes_"), hasattr(estimator, "predict_proba"))
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    imported = Model.from_proto(ir.to_proto(model))
    clean(imported.ir)
    for value in imported.ir.graph.outputs:
        value.shape = ir.Shape([BATCH, *dims(value)[1:]])  # one answer for each row; the comparison fails otherwise
    record_parameters(imported.ir, _weights(imported.ir))
    return imported


def _name_outputs(op: Builder, classifies: bool, probable: bool) -> None:
    result = op.graph.outputs[0]
    op.graph.outputs.clear()
    if not classifies:
        op.name_output(result, "output")
    elif not probable:
        op.name_output(_two_scores(op, result), "scores")
    else:
        op.name_output(_logits(op, result), "logits")
        op.name_output(result, "probabilities")


def _two_scores(op: Builder, scores: ir.Value) -> ir.Value:
    """[0, score] where there is one score for two classes."""
    if dims(scores)[-1] != 1:
        return scores
    node = scores.producer()
    if node is not None and node.op_type == "Gather" and node.inputs[0] is not None:
        return node.inputs[0]  # the rewritten classifier has computed both
    return op.Pad(scores, [0, 1, 0, 0])


def _logits(op: Builder, probabilities: ir.Value) -> ir.Value:
    """Logits whose softmax is the probabilities: the loss `cross_entropy` takes logits."""
    node = trace_back(probabilities, ("Identity", "Cast")).producer()
    if node is not None and node.op_type == "Softmax" and node.inputs[0] is not None:
        return node.inputs[0]
    score = _binary_score(node)
    if score is not None:
        return op.Pad(score, [0, 1, 0, 0])  # [0, score]: softmax of it is [1 - sigmoid, sigmoid]
    # Any other probabilities: the softmax of their logarithms is they themselves, as they sum to 1.
    return op.Log(op.Max(probabilities, _SMALLEST))


def _binary_score(node: ir.Node | None) -> ir.Value | None:
    """s, [batch, 1], of Concat(1 - Sigmoid(s), Sigmoid(s))."""
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2:
        return None
    second = node.inputs[1]
    sigmoid = None if second is None else second.producer()
    rest = None if node.inputs[0] is None else node.inputs[0].producer()
    if sigmoid is None or sigmoid.op_type != "Sigmoid" or rest is None or rest.op_type != "Sub":
        return None
    return sigmoid.inputs[0] if rest.inputs[1] is second else None


def _weights(model: ir.Model) -> list[str]:
    """Names of the weights and biases of linear layers. Numbers that scale and centre features stay as fitted."""
    names = []
    for name, value in model.graph.initializers.items():
        if not is_float(value) or rank(value) == 0:
            continue
        for use in value.uses():
            # A bias may be added by a node of its own behind the product.
            other = use.node.inputs[1 - use.idx] if use.node.op_type == "Add" and use.idx < 2 else None
            producer = None if other is None else other.producer()
            if use.node.op_type in _LAYERS or (producer is not None and producer.op_type in _LAYERS):
                names.append(name)
                break
    return names


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
