"""Operators of the domain ai.onnx.ml rewritten with standard ones (their definitions: onnx/defs/traditionalml)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.errors import ModelImportError
from archipel.graph.build import Builder
from archipel.graph.opset import OPSET
from archipel.graph.shapes import constant_array, dims, infer_node

DOMAIN = "ai.onnx.ml"
_EPSILON = 1e-30

_TREES = "a tree has no gradient and no standard form; fit MLPClassifier or MLPRegressor to its predictions instead"
_KERNELS = "its support vectors have no standard form; use LinearSVC, or Nystroem with LogisticRegression, or an MLP"
_TEXT = "text is not an input of a device's model; encode it before"

# Operators without a standard form, and what to use instead.
REFUSED = {
    "TreeEnsemble": _TREES,
    "TreeEnsembleClassifier": _TREES,
    "TreeEnsembleRegressor": _TREES,
    "SVMClassifier": _KERNELS,
    "SVMRegressor": _KERNELS,
    "CategoryMapper": _TEXT,
    "DictVectorizer": _TEXT,
    "LabelEncoder": _TEXT,
    "OneHotEncoder": "encode categories as columns of 0 and 1 before",
}


def rewrite(op: Builder, name: str) -> None:
    """Rewrite every node of ai.onnx.ml in the graph. Raises ModelImportError for one that has no standard form."""
    for node in list(op.graph):
        if node.domain != DOMAIN:
            if any(output.dtype is None or output.shape is None for output in node.outputs):
                infer_node(node, OPSET)  # ONNX could not infer it behind an ai.onnx.ml node; now that is standard
            continue
        rule = _RULES.get(node.op_type)
        if rule is None:
            remedy = REFUSED.get(node.op_type, "use an estimator of linear layers, scalers and the like")
            raise ModelImportError(f"{name} needs {node.op_type}, which is not standard ONNX: {remedy}")
        with op.before(node):
            result = rule(op, node, name)
        output = node.outputs[-1]  # of a classifier the scores; its labels are not kept
        output.replace_all_uses_with(result, replace_graph_outputs=True)
        op.graph.remove(node, safe=True)


def _attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _array(node: ir.Node, name: str) -> np.ndarray | None:
    numbers = _attribute(node, name)
    return None if numbers is None or len(numbers) == 0 else np.array(numbers, np.float32)


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    if value is None:
        raise ModelImportError(f"{node.op_type} {node.name!r} has no input")
    return value


def _linear(op: Builder, node: ir.Node, rows: np.ndarray, bias: np.ndarray) -> ir.Value:
    """[batch, features] times `rows`, [outputs, features], plus `bias`."""
    # Initializers of their own, not constants that others share, so that they can be trained.
    weight = op.initializer("coefficients", np.asarray(rows, np.float32))
    intercept = op.initializer("intercepts", np.asarray(bias, np.float32))
    return op.Gemm(_input(node), weight, intercept, transB=1)


def _linear_classifier(op: Builder, node: ir.Node, name: str) -> ir.Value:
    labels = _attribute(node, "classlabels_ints") or _attribute(node, "classlabels_strings") or ()
    bias = _array(node, "intercepts")
    coefficients = np.array(_attribute(node, "coefficients"), np.float32)
    if not labels or coefficients.size % len(labels):
        raise ModelImportError(f"{name}: {node.op_type} has {coefficients.size} coefficients, {len(labels)} classes")
    rows: np.ndarray = coefficients.reshape(len(labels), -1)
    bias = np.zeros(len(rows), np.float32) if bias is None else bias
    form = _attribute(node, "post_transform", b"NONE")
    form = form.decode() if isinstance(form, bytes) else form
    opposite = len(rows) == 2 and np.array_equal(rows[0], -rows[1]) and bias[0] == -bias[1]
    if form in ("LOGISTIC", "NONE") and opposite:
        # (sigmoid(-z), sigmoid(z)) is softmax(0, z): as a softmax it can be trained with cross entropy on its logits.
        rows, bias = rows * np.array([[0.0], [1.0]]), bias * np.array([0.0, 1.0])
        form = "SOFTMAX" if form == "LOGISTIC" else form
    scores = _linear(op, node, rows, bias)
    match form:
        case "NONE":
            return scores
        case "SOFTMAX":
            result = op.Softmax(scores, axis=-1)
        case "LOGISTIC":
            result = op.Sigmoid(scores)
        case _:
            raise ModelImportError(f"{name}: {node.op_type} with post_transform={form} has no standard form here")
    return result


def _linear_regressor(op: Builder, node: ir.Node, name: str) -> ir.Value:
    targets = _attribute(node, "targets", 1)
    rows = np.array(_attribute(node, "coefficients"), np.float32).reshape(targets, -1)
    bias = _array(node, "intercepts")
    return _linear(op, node, rows, np.zeros(targets, np.float32) if bias is None else bias)


def _scaler(op: Builder, node: ir.Node, name: str) -> ir.Value:
    result = _input(node)
    offset, scale = _array(node, "offset"), _array(node, "scale")
    if offset is not None:
        result = op.Sub(result, offset)
    if scale is not None:
        result = op.Mul(result, scale)
    return result


def _normalizer(op: Builder, node: ir.Node, name: str) -> ir.Value:
    value = _input(node)
    producer = value.producer()
    norm = _attribute(node, "norm", "MAX")
    norm = norm.decode() if isinstance(norm, bytes) else norm
    if norm == "L1" and producer is not None and producer.op_type == "Softmax":
        return value  # probabilities sum to one already
    match norm:
        case "L1":
            length = op.ReduceL1(value, [-1], keepdims=1)
        case "L2":
            length = op.ReduceL2(value, [-1], keepdims=1)
        case _:
            length = op.ReduceMax(op.Abs(value), [-1], keepdims=1)
    return op.Div(value, op.Max(length, _EPSILON))  # a row of zeros stays zero


def _imputer(op: Builder, node: ir.Node, name: str) -> ir.Value:
    value, filling = _input(node), _array(node, "imputed_value_floats")
    missing = _attribute(node, "replaced_value_float", float("nan"))
    if filling is None:
        raise ModelImportError(f"{name}: {node.op_type} of integers has no standard form here; impute before")
    absent = op.IsNaN(value) if np.isnan(missing) else op.Equal(value, float(missing))
    return op.Where(absent, filling, value)


def _binarizer(op: Builder, node: ir.Node, name: str) -> ir.Value:
    threshold = float(_attribute(node, "threshold", 0.0))
    return op.Cast(op.Greater(_input(node), threshold), to=int(ir.DataType.FLOAT))


def _extractor(op: Builder, node: ir.Node, name: str) -> ir.Value:
    columns = constant_array(node.inputs[1])
    if columns is None or len(dims(_input(node))) != 2:
        raise ModelImportError(f"{name}: {node.op_type} with computed columns has no standard form here")
    return op.Gather(_input(node), columns.reshape(-1).astype(np.int64), axis=1)


def _vectorizer(op: Builder, node: ir.Node, name: str) -> ir.Value:
    return op.Concat(*node.inputs, axis=1)


_RULES: dict[str, Callable[[Builder, ir.Node, str], ir.Value]] = {
    "ArrayFeatureExtractor": _extractor,
    "Binarizer": _binarizer,
    "FeatureVectorizer": _vectorizer,
    "Imputer": _imputer,
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "Normalizer": _normalizer,
    "Scaler": _scaler,
}
