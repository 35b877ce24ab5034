"""The keywords of before the groups: each works, says how it is written now, and excludes its group."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from archipel import Model
from archipel.bundle import Bundle, Lineage, Phase, generate_key
from archipel.compression import FineTune, StaticInt8
from archipel.converter import Analysis, Compression, Mean, Signing, Training, convert
from archipel.converter.former_keywords import GROUPS
from archipel.errors import ConversionError
from archipel.training import losses, optimizers

KEY = generate_key()
LOSS, SGD = losses.cross_entropy(), optimizers.sgd(lr=0.1)
X = np.random.default_rng(0).standard_normal((32, 4), np.float32)
Y = np.arange(32) % 3
DIGEST = "0123456789abcdef" * 4
MEAN = [Mean(name="light", low=0, high=1)]
INT8 = [StaticInt8(examples=16)]

# For each former keyword: what it is given, with what else, and the same as it is written now.
TRAINED: dict[str, Any] = {"loss": LOSS, "optimizer": SGD}
SMALL: dict[str, Any] = {"recipe": INT8, "calibration": X}
FORMER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "loss": (TRAINED, {"training": Training(LOSS, SGD)}),
    "optimizer": (TRAINED, {"training": Training(LOSS, SGD)}),
    "trainable": ({**TRAINED, "trainable": "head"}, {"training": Training(LOSS, SGD, trainable="head")}),
    "step_options": (
        {**TRAINED, "step_options": {"accumulate": 2}},
        {"training": Training(LOSS, SGD, step_options={"accumulate": 2})},
    ),
    "strategy": ({**TRAINED, "strategy": "scaffold"}, {"training": Training(LOSS, SGD, strategy="scaffold")}),
    "strategy_options": (
        {**TRAINED, "strategy_options": {"clip": 2.0}},
        {"training": Training(LOSS, SGD, strategy_options={"clip": 2.0})},
    ),
    "epochs": ({**TRAINED, "epochs": 3}, {"training": Training(LOSS, SGD, epochs=3)}),
    "batch_size": ({**TRAINED, "batch_size": 4}, {"training": Training(LOSS, SGD, batch_size=4)}),
    "recipe": (SMALL, {"compression": Compression(INT8, calibration=X)}),
    "calibration": (SMALL, {"compression": Compression(INT8, calibration=X)}),
    "data": (
        {"recipe": [FineTune(steps=2)], "data": (X, Y)},
        {"compression": Compression([FineTune(steps=2)], data=(X, Y))},
    ),
    "validation": (
        {**SMALL, "validation": (X, Y)},
        {"compression": Compression(INT8, calibration=X, validation=(X, Y))},
    ),
    "seed": (
        {"recipe": [FineTune(steps=2)], "data": (X, Y), "seed": 5},
        {"compression": Compression([FineTune(steps=2)], data=(X, Y), seed=5)},
    ),
    "sequence": ({"sequence": 3}, {"signing": Signing(KEY, sequence=3)}),
    "not_after": ({"not_after": 0}, {"signing": Signing(KEY, not_after=0)}),
    "populations": ({"populations": ["b", "a"]}, {"signing": Signing(KEY, populations=["b", "a"])}),
    "parent": ({"parent": DIGEST}, {"signing": Signing(KEY, parent=DIGEST)}),
    "lineage": ({"lineage": Lineage(recipe=("r",))}, {"signing": Signing(KEY, lineage=Lineage(recipe=("r",)))}),
    "statistics": ({"statistics": MEAN}, {"analysis": Analysis(MEAN)}),
    "max_examples": ({"statistics": MEAN, "max_examples": 9}, {"analysis": Analysis(MEAN, max_examples=9)}),
    "sign_key": ({}, {}),
    "target": ({"target": "onnxruntime"}, {}),
}
ELSEWHERE = {"folder", "on_progress"}  # they are no part of the bundle and have a test of their own


@pytest.fixture(scope="module")
def model() -> Model:
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, 4] x) => (float[batch, 3] y)
        { h = MatMul (x, body) r = Relu (h) y = MatMul (r, head) }"""
    )
    rng = np.random.default_rng(1)
    for name, shape in {"body": (4, 8), "head": (8, 3)}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    return Model.from_proto(proto)


def formerly(source: Model, path: Path, **arguments: Any) -> tuple[Bundle, str]:
    """The bundle, and the one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bundle = convert(source, path, name="net", sign_key=KEY, **arguments)
    [warning] = caught
    assert warning.category is DeprecationWarning
    assert Path(warning.filename) == Path(__file__)  # the caller's line
    return bundle, str(warning.message)


def test_every_former_keyword_is_here() -> None:
    assert {keyword for keywords in GROUPS.values() for keyword in keywords} | {"target"} == set(FORMER) | ELSEWHERE
    # What is still one has not become a former one.
    assert set(inspect.signature(convert).parameters) == {
        "source", "path", "training", "analysis", "compression", "signing", "example", "name", "privacy", "self_test",
        "min_agreement", "min_snr", "card",
    }  # fmt: skip


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("keyword", FORMER)
def test_it_makes_the_same_bundle_and_says_how_it_is_written_now(keyword: str, model: Model, tmp_path: Path) -> None:
    former, now = FORMER[keyword]
    bundle, warning = formerly(model, tmp_path / "former", **former)
    assert bundle.digest == convert(model, tmp_path / "now", name="net", **{"signing": Signing(KEY), **now}).digest
    told = "leave target= out" if keyword == "target" else f"{keyword}= is now "
    assert told in warning
    assert warning.endswith("The former keywords end with version 0.2")


def test_the_new_spelling_is_whole(model: Model, tmp_path: Path) -> None:
    _, warning = formerly(model, tmp_path / "b", **TRAINED, epochs=2)
    assert "loss= is now training=Training(loss, ...)" in warning
    assert "epochs= is now training=Training(..., epochs=)" in warning
    assert "sign_key= is now signing=Signing(key)" in warning


def test_where_a_run_is_kept_and_told(model: Model, tmp_path: Path) -> None:
    told: list[str] = []
    _, warning = formerly(
        model, tmp_path / "b", **SMALL, folder=tmp_path / "run", on_progress=lambda progress: told.append(progress.what)
    )  # fmt: skip
    assert "folder= is now compression=Compression(..., folder=)" in warning
    assert "on_progress= is now compression=Compression(..., on_progress=)" in warning
    assert (tmp_path / "run" / "state.json").exists()
    assert "StaticInt8" in told


def test_limits_of_what_only_predicts_follow_the_batch_size(model: Model, tmp_path: Path) -> None:
    bundle, _ = formerly(model, tmp_path / "b", batch_size=32)
    # Weights of 4 x 8 and 8 x 3, and for each example the input and what two layers make of it, 8 at a time.
    assert bundle.manifest.limits.peak_bytes == 4 * (4 * 8 + 8 * 3 + 32 * (4 + 8 + 8))


def test_what_meant_nothing_without_its_leader_still_does(model: Model, tmp_path: Path) -> None:
    bundle, _ = formerly(model, tmp_path / "b", strategy="scaffold", epochs=3, calibration=X, loss=None, recipe=None)
    assert bundle.digest == convert(model, tmp_path / "c", name="net", signing=Signing(KEY)).digest
    bundle, _ = formerly(model, tmp_path / "d", recipe=[], statistics=(), not_after=None, lineage=None)
    assert bundle.digest == convert(model, tmp_path / "e", name="net", signing=Signing(KEY)).digest


def test_groups_of_the_others_may_stand_beside_them(model: Model, tmp_path: Path) -> None:
    bundle, _ = formerly(model, tmp_path / "b", training=Training(LOSS, SGD, epochs=4))
    assert bundle.manifest.schedule == (Phase(program="train", epochs=4, batch_size=16),)


@pytest.mark.parametrize(
    ("group", "keyword"),
    [
        *(("training", keyword) for keyword in GROUPS["training"]),
        *(("compression", keyword) for keyword in GROUPS["compression"]),
        *(("signing", keyword) for keyword in GROUPS["signing"]),
        *(("analysis", keyword) for keyword in GROUPS["analysis"]),
    ],
)
def test_a_group_and_a_keyword_that_it_holds(group: str, keyword: str, model: Model, tmp_path: Path) -> None:
    groups: dict[str, Any] = {
        "training": Training(LOSS, SGD), "compression": Compression(INT8, calibration=X), "signing": Signing(KEY),
        "analysis": Analysis(MEAN),
    }  # fmt: skip
    arguments = {"signing": Signing(KEY), group: groups[group], keyword: 1}
    with (
        pytest.warns(DeprecationWarning, match="end with version 0.2"),
        pytest.raises(ConversionError, match=f"convert: {keyword}= and {group}= at once; write {group}="),
    ):
        convert(model, tmp_path / "b", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"target": "tflite"}, "target 'tflite': this version converts for 'onnxruntime'; leave target= out"),
        ({"loss": LOSS}, r"a loss without an optimizer: pass training=Training\(loss, optimizer\)"),
        ({"optimizer": SGD}, r"an optimizer without a loss: pass training=Training\(loss, optimizer\)"),
        ({"step_options": {"accumulate": 2}}, "step_options without a loss: pass training="),
        ({"sign_key": None}, r"must be signed: pass signing=Signing\(key\)"),
        ({"sign_key": None, "sequence": 3}, r"must be signed: pass signing=Signing\(key\)"),
        ({**TRAINED, "statistics": MEAN}, "analysis with training: an analysis is a bundle of its own"),
    ],
)
def test_what_cannot_be(arguments: dict[str, Any], text: str, model: Model, tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="end with version 0.2"), pytest.raises(ConversionError, match=text):
        convert(model, tmp_path / "b", **{"sign_key": KEY, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_a_keyword_that_never_was(model: Model, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rate'"):
        convert(model, tmp_path / "b", signing=Signing(KEY), learning_rate=0.1)  # type: ignore[call-arg]
