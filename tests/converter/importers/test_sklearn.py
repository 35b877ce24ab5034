"""Model.from_sklearn: standard operators, trainable, and the estimator's own answers."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnxruntime
import pytest

from archipel import Model, training
from archipel.errors import MissingExtraError, ModelImportError
from archipel.graph import check_model

pytest.importorskip("skl2onnx")
pytest.importorskip("sklearn")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the packages' own imports
    from sklearn.base import BaseEstimator
    from sklearn.decomposition import PCA
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge, RidgeClassifier
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, RobustScaler, StandardScaler
    from sklearn.svm import SVC, LinearSVC

RNG = np.random.default_rng(0)
X = RNG.standard_normal((90, 5)) * [1, 10, 0.1, 3, 1] + [0, 5, 0, -2, 0]
THREE = (X @ [1, 0.1, 5, 0.3, 1] > 0).astype(int) + (X[:, 4] > 0.5)
TWO = (THREE > 0).astype(int)
REAL = X @ np.arange(5.0) + 1


def small(kind: type[MLPClassifier | MLPRegressor], **options: str) -> MLPClassifier | MLPRegressor:
    return kind(hidden_layer_sizes=(6,), max_iter=30, random_state=0, **options)


PROBABLE = {
    "three classes": (make_pipeline(StandardScaler(), LogisticRegression()), THREE),
    "two classes": (make_pipeline(RobustScaler(), LogisticRegression()), TWO),
    "names": (make_pipeline(MaxAbsScaler(), LogisticRegression()), np.array(["a", "b", "c"])[THREE]),
    "perceptron": (make_pipeline(MinMaxScaler(), small(MLPClassifier)), THREE),
    "perceptron of two": (make_pipeline(StandardScaler(), small(MLPClassifier, activation="tanh")), TWO),
    "unit rows": (make_pipeline(Normalizer(), LogisticRegression()), THREE),
}


def fitted(estimator: BaseEstimator, y: np.ndarray) -> BaseEstimator:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few iterations
        return estimator.fit(X, y)


def run(model: Model, x: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.to_bytes(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": x.astype(np.float32)})
    return {port.name: value for port, value in zip(model.outputs, found)}


@pytest.mark.parametrize("case", PROBABLE)
def test_classifiers_answer_and_train(case: str) -> None:
    estimator, y = PROBABLE[case]
    fitted(estimator, y)
    model = Model.from_sklearn(estimator, X)
    check_model(model.ir)
    classes = len(estimator.classes_)
    assert model.inputs[0].shape == ("batch", 5)
    assert [(port.name, port.shape) for port in model.outputs] == [
        ("logits", ("batch", classes)),
        ("probabilities", ("batch", classes)),
    ]
    other = X[::-1][:17] * 0.9
    found, expected = run(model, other), estimator.predict_proba(other)
    np.testing.assert_allclose(found["probabilities"], expected, rtol=1e-4, atol=1e-5)
    powers = np.exp(found["logits"] - found["logits"].max(1, keepdims=True))
    np.testing.assert_allclose(powers / powers.sum(1, keepdims=True), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(estimator.classes_[found["logits"].argmax(1)], estimator.predict(other))
    report = model.import_report
    assert report is not None
    assert report.deviation is not None
    assert report.deviation <= 1e-4
    assert report.notes == (f"classes, in the order of the outputs: {', '.join(map(str, estimator.classes_))}",)
    # What scales the features is no parameter; coefficients and intercepts of every layer are.
    layers = len(getattr(estimator[-1], "coefs_", [0]))
    assert len(model.parameter_names) == 2 * layers
    step = training.step_graph(model, training.losses.cross_entropy(), training.optimizers.sgd())
    labels = np.searchsorted(estimator.classes_, y)
    losses = training.run_steps(step, [(X.astype(np.float32), labels)] * 5, {"lr": 0.01})
    assert losses[-1] < losses[0]


NUMBERS = {
    "ridge": (make_pipeline(StandardScaler(), Ridge()), REAL),
    "two targets": (LinearRegression(), np.stack([REAL, -REAL], 1)),
    "perceptron": (make_pipeline(StandardScaler(), small(MLPRegressor)), REAL),
    "missing values": (make_pipeline(SimpleImputer(), PCA(3), Ridge()), REAL),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_regressors_answer(case: str) -> None:
    estimator, y = NUMBERS[case]
    fitted(estimator, y)
    x = X.copy()
    if case == "missing values":
        x[::7, 2] = np.nan
    model = Model.from_sklearn(estimator, x)
    check_model(model.ir)
    expected = estimator.predict(x).reshape(len(x), -1)
    np.testing.assert_allclose(run(model, x)["output"], expected, rtol=1e-4, atol=1e-4)
    assert model.outputs[0].shape == ("batch", expected.shape[1])
    assert model.parameter_names


@pytest.mark.parametrize("kind", [LinearSVC, RidgeClassifier])
@pytest.mark.parametrize("y", [TWO, THREE], ids=["two", "three"])
def test_scores_where_there_are_no_probabilities(kind: type[LinearSVC | RidgeClassifier], y: np.ndarray) -> None:
    estimator = fitted(make_pipeline(StandardScaler(), kind()), y)
    scores = run(Model.from_sklearn(estimator, X), X)["scores"]
    assert scores.shape == (90, len(estimator.classes_))
    expected = estimator.decision_function(X)
    np.testing.assert_allclose(
        scores[:, 1] - scores[:, 0] if expected.ndim == 1 else scores, expected, rtol=1e-4, atol=1e-5
    )


REFUSED = {
    "trees": (RandomForestClassifier(3), THREE, X, "needs TreeEnsembleClassifier, .* a tree has no gradient.* MLP"),
    "kernels": (SVC(), THREE, X, "needs SVMClassifier, which is not standard ONNX: .*Nystroem"),
    "shape": (Ridge(), REAL, X[0], r"example must be \[examples, features\], has shape \[5\]"),
    "text": (Ridge(), REAL, [["a", "b"]], "example must be numbers"),
    "width": (Ridge(), REAL, X[:, :3], "Ridge.predict fails on the example"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why(case: str) -> None:
    estimator, y, example, message = REFUSED[case]
    with pytest.raises(ModelImportError, match=message):
        Model.from_sklearn(fitted(estimator, y), example)


def test_not_fitted_and_not_an_estimator() -> None:
    with pytest.raises(ModelImportError, match=r"Ridge\.predict fails on the example: .*not fitted"):
        Model.from_sklearn(Ridge(), X)
    with pytest.raises(ModelImportError, match="dict has neither predict nor transform"):
        Model.from_sklearn({}, X)


def test_without_skl2onnx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skl2onnx", None)
    with pytest.raises(MissingExtraError, match=r"skl2onnx is not installed.*archipel\[sklearn\]"):
        Model.from_sklearn(object(), X)
