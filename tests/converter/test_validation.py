"""A wrong argument of `convert` is told before the model is read or, where it takes the model to tell, compressed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import onnx
import pytest

from archipel import Model
from archipel.bundle import Lineage, PrivacyPolicy, generate_key
from archipel.compression import CompressedModel, Distil, FineTune, LowRank, StaticInt8, Work, recipe
from archipel.converter import Analysis, Compression, Histogram, Mean, Quantiles, Signing, Sum, Training, convert
from archipel.errors import (
    ArchipelError,
    CompressionError,
    ConversionError,
    GraphError,
    ManifestError,
    TrainingError,
)
from archipel.training import losses, optimizers, per_example, transforms

KEY = generate_key()
LOSS, SGD = losses.cross_entropy(), optimizers.sgd(lr=0.1)
X = np.random.default_rng(0).standard_normal((32, 4), np.float32)
Y = np.arange(32) % 3
PRIVACY = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.67, max_clip=10.0, max_bits=24)
UNIFORM = msgspec.structs.replace(PRIVACY, weighting="uniform")
DIGEST = "0123456789abcdef" * 4

Make = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Recording:
    """A part that leaves the model as it is, and a mark that it ran."""

    applied: ClassVar[list[str]] = []

    @property
    def needs(self) -> tuple[str, ...]:
        return ()

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        self.applied.append("ran")
        return CompressedModel.of(model)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "PARTS", (*recipe.PARTS, Recording))
    Recording.applied.clear()


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


def right() -> dict[str, Any]:
    """Arguments with nothing wrong."""
    return {
        "training": Training(LOSS, SGD, trainable="head"),
        "compression": Compression([Recording(), StaticInt8(examples=16)], calibration={"x": X}),
        "signing": Signing(KEY),
        "privacy": PRIVACY,
        "self_test": {"x": X[:2]},
    }


def training(**changes: Any) -> Make:
    return lambda: {"training": Training(**{"loss": LOSS, "optimizer": SGD, **changes})}


def compression(*parts: Any, **changes: Any) -> Make:
    return lambda: {"compression": Compression([Recording(), *parts], **changes)}


def signing(**changes: Any) -> Make:
    return lambda: {"signing": Signing(**{"key": KEY, **changes})}


def analysis(*statistics: Any, **changes: Any) -> Make:
    return lambda: {"training": None, "analysis": Analysis(statistics, **changes)}


def given(**arguments: Any) -> Make:
    return lambda: arguments


MEAN = Mean(name="light", low=0, high=1)

BEFORE: dict[str, tuple[Make, type[ArchipelError], str]] = {
    "no signing": (
        given(signing=None),
        ConversionError,
        r"must be signed: pass signing=Signing\(key\); `arch",
    ),
    "a bare key": (given(signing=KEY), ConversionError, "signing: expected a converter.Signing, got Ed25519"),
    "a key's file": (
        signing(key="publisher"),
        ConversionError,
        "signing: key: expected an Ed25519 private .* got str",
    ),
    "sequence below 0": (signing(sequence=-1), ConversionError, "signing: sequence: expected a whole .* got int -1"),
    "sequence 1.0": (signing(sequence=1.0), ConversionError, "signing: sequence: expected a whole .* got float 1.0"),
    "a large sequence": (signing(sequence=2**53), ConversionError, "signing: sequence: .* from 0 to 9007199254740991"),
    "an end as text": (signing(not_after="2030"), ConversionError, r"signing: not_after \(Unix seconds\): .* got str"),
    "an end before 1970": (signing(not_after=-1), ConversionError, "signing: not_after .* got int -1"),
    "one population": (signing(populations="staff"), ConversionError, "populations: expected a list of names, got 'st"),
    "a population's name": (signing(populations=["a b"]), ConversionError, "populations: .* letters, .* got 'a b'"),
    "populations": (
        signing(populations=[f"p{i}" for i in range(65)]),
        ConversionError,
        "populations: expected at most 64, got 65",
    ),
    "parent": (signing(parent="abc"), ManifestError, "signing: parent: expected a SHA-256 in 64 .* got 'abc'"),
    "lineage": (signing(lineage={"parent": DIGEST}), ConversionError, "signing: lineage: expected a bundle.Lineage"),
    "lineage's numbers": (
        signing(lineage=Lineage(metrics={"accuracy": "high"})),
        ConversionError,
        "signing: lineage: Expected `float`, got `str` - at `\\$.metrics",
    ),
    "two parents": (
        signing(parent=DIGEST, lineage=Lineage(parent="f" * 64)),
        ConversionError,
        "signing: parent is 0123.* but that of lineage is ffff.*; give it in lineage alone",
    ),
    "no training": (given(training=LOSS), ConversionError, "training: expected a converter.Training, got CrossEntropy"),
    "a loss that is not called": (
        training(loss=losses.cross_entropy),
        TrainingError,
        r"training: expected one of training.losses, got .* call it: cross_entropy\(\)",
    ),
    "an optimizer": (training(optimizer=0.1), TrainingError, "expected one of training.optimizers, got 0.1"),
    "trainable": (training(trainable=3), TrainingError, "training: trainable must be a pattern or a list .* is 3"),
    "nothing trainable": (training(trainable=[]), ConversionError, "training: trainable is empty; name at least one"),
    "step options": (training(step_options=["accumulate"]), ConversionError, "step_options must be a mapping"),
    "a step option": (training(step_options={"lr": 1}), ConversionError, "no option 'lr'; step_graph has accumulate"),
    "steps": (training(step_options={"steps": 4}), ConversionError, "steps=4, but devices .* use accumulate="),
    "accumulate": (training(step_options={"accumulate": 0}), TrainingError, "accumulate must be .* 1 or more, is 0"),
    "batch_norm": (
        training(step_options={"batch_norm": "eval"}),
        TrainingError,
        "batch_norm must be 'train', 'froz",
    ),
    "dropout": (training(step_options={"dropout": "no"}), TrainingError, "dropout must be True or False, is 'no'"),
    "precision": (training(step_options={"precision": "half"}), TrainingError, "precision must be 'float32', 'mixed' "),
    "transforms": (training(step_options={"transforms": [SGD]}), TrainingError, "expected one of training.transforms"),
    "per_example": (training(step_options={"per_example": 1.0}), TrainingError, "per_example must be .* is 1.0"),
    "a strategy": (
        training(strategy="ghost"),
        ArchipelError,
        "no strategy 'ghost'; there are: ditto, dpsgd, fedadagrad",
    ),
    "strategy 3": (training(strategy=3), ConversionError, "training: strategy: expected the name of .* got int 3"),
    "strategy options": (training(strategy_options=["clip"]), ConversionError, "strategy_options must be a mapping"),
    "a strategy's option": (training(strategy_options={"mu": 1}), ConversionError, "'fedavg': no option 'mu'; it has"),
    "clip": (training(strategy_options={"clip": 0}), ConversionError, "'fedavg': clip must be a number above 0, is 0"),
    "personal": (training(strategy="fedrep"), ConversionError, "'fedrep': needs the option 'personal'; pass strategy_"),
    "momentum": (
        training(strategy="scaffold", optimizer=optimizers.sgd(0.9, nesterov=True)),
        ConversionError,
        "'scaffold': counts on plain momentum; leave nesterov and dampening out",
    ),
    "clipped twice": (
        training(strategy="dpsgd", step_options={"per_example": per_example()}),
        ConversionError,
        "'dpsgd' clips single examples itself; leave per_example out",
    ),
    "no epoch": (training(epochs=0), ConversionError, "training: epochs: expected .* from 1 to 10000, got int 0"),
    "half an epoch": (training(epochs=0.5), ConversionError, "training: epochs: expected a whole number"),
    "epochs": (
        training(epochs=10_001),
        ConversionError,
        "training: epochs: expected .* to 10000, got int 10001",
    ),
    "personal epochs": (
        training(strategy="fedrep", strategy_options={"personal": "head", "personal_epochs": 10_001}),
        ConversionError,
        "strategy_options: epochs of 'train': expected a whole number from 1 to 10000",
    ),
    "batch_size": (training(batch_size=0), ConversionError, "training: batch_size: .* of 1 or more, got int 0"),
    "a NumPy number": (training(batch_size=np.int64(4)), ConversionError, "batch_size: expected .* got int64"),
    "no compression": (given(compression=[Recording()]), ConversionError, "compression: expected a converter.Compress"),
    "a recipe's file": (lambda: {"compression": Compression("no.toml")}, CompressionError, "no.toml: no such file"),
    "a part": (compression("int8"), CompressionError, "recipe: 'int8' is no part; there are PruneChannels"),
    "calibration": (
        compression(StaticInt8()),
        CompressionError,
        "part 2 of the recipe, StaticInt8: StaticInt8 needs calibration data; pass calibration=inputs",
    ),
    "data": (compression(FineTune(), calibration=X), CompressionError, "FineTune needs training data; pass data="),
    "validation": (
        compression(StaticInt8(max_drop=1.0), data=(X, Y)),
        CompressionError,
        "StaticInt8 needs validation data; pass validation=",
    ),
    "a teacher": (compression(Distil(teacher="no.onnx"), data=(X, Y)), CompressionError, "no.onnx: no such file"),
    "seed": (compression(seed=-1), ConversionError, "compression: seed: .* of 0 or more, got int -1"),
    "folder": (compression(folder=3), ConversionError, "compression: folder: expected a path, got int 3"),
    "on_progress": (compression(on_progress=3), ConversionError, "on_progress: expected a function .* got 3"),
    "no statistics": (analysis(), ConversionError, r"statistics: expected a list of one or more, got \(\)"),
    "a statistic": (analysis("light"), ConversionError, "expected converter.Sum, Mean, Histogram or Quantiles, got 'l"),
    "a statistic's name": (analysis(Mean(name="", low=0, high=1)), ConversionError, "a name is text of 1 to 240"),
    "bounds": (analysis(Sum(name="a", low=1, high=1)), ConversionError, "'a': low 1 is not below high 1"),
    "a bound": (analysis(Sum(name="a", low="0", high=1)), ConversionError, "'a': a bound that is no number"),
    "edges": (analysis(Histogram(name="a", edges=[2, 1])), ConversionError, "'a': edges must be finite and grow"),
    "shares": (
        analysis(Quantiles(name="a", edges=[1, 2], probabilities=[1.5])),
        ConversionError,
        "'a': probabilities must be from 0 to 1",
    ),
    "one name": (analysis(MEAN, MEAN), ConversionError, "statistic 'light': there are two of that name"),
    "max_examples": (analysis(MEAN, max_examples=0), ConversionError, "max_examples: .* of 1 or more, got int 0"),
    "counts": (analysis(MEAN, max_examples=2**24), ConversionError, "counts need 26 bits, .* allows 24"),
    "both": (given(analysis=Analysis([MEAN])), ConversionError, "analysis with training: .* leave one of them out"),
    "no analysis": (given(analysis=[MEAN]), ConversionError, "analysis: expected a converter.Analysis, got list"),
    "a name of two lines": (given(name="a\nb"), ManifestError, "name: expected 1 to 256 printable .* got 'a"),
    "a name": (given(name=3), ConversionError, "name: expected text, got int 3"),
    "privacy": (given(privacy={}), ConversionError, "privacy: expected a bundle.PrivacyPolicy, got dict"),
    "a policy's type": (
        given(privacy=msgspec.structs.replace(PRIVACY, min_cohort="ten")),
        ConversionError,
        r"privacy: Expected `int`, got `str` - at `\$.min_cohort`",
    ),
    "a policy's bound": (
        given(privacy=msgspec.structs.replace(PRIVACY, threshold=0.5)),
        ManifestError,
        "privacy: secure mode needs min_cohort >= 2 and threshold above 0.5",
    ),
    "weighting": (
        lambda: {**training(strategy_options={"weighting": "examples"})(), "privacy": UNIFORM},
        ConversionError,
        "strategy_options: weighting is 'examples', but the privacy policy wants",
    ),
    "self_test": (given(self_test=X), ConversionError, "self_test: expected arrays by the names .* got ndarray"),
}
"""With a source that is not there: reading it is another error."""

WITH_THE_MODEL: dict[str, tuple[Make, type[ArchipelError], str]] = {
    "trainable": (training(trainable="ghost.*"), GraphError, "no parameter matches 'ghost.*'; there are: body, head"),
    "class weights": (
        training(loss=losses.cross_entropy(class_weights=[1.0, 2.0])),
        TrainingError,
        "2 class_weights, but the output 'y' has 3 classes",
    ),
    "personal": (
        training(strategy="fedrep", strategy_options={"personal": "tail"}),
        ConversionError,
        "'fedrep': personal: no parameter matches 'tail'",
    ),
    "nothing shared": (
        training(strategy="fedrep", strategy_options={"personal": "*"}),
        ConversionError,
        "every trained tensor is personal",
    ),
    "no normalization": (training(strategy="fedbn"), ConversionError, "no trained tensor is a weight of BatchNormaliz"),
    "targets": (
        training(strategy="lora", strategy_options={"targets": "ghost"}),
        ConversionError,
        "'lora': targets: no parameter matches 'ghost'",
    ),
    "a broadcast": (
        training(step_options={"transforms": [transforms.proximal(0.1, "broadcast")]}),
        ConversionError,
        "strategy 'fedavg' does not broadcast it; use anchor='start'",
    ),
    "a hyperparameter twice": (
        training(strategy="fedprox", step_options={"transforms": [transforms.proximal(0.1)]}),
        TrainingError,
        "two parts of the step have a hyperparameter 'mu'",
    ),
    "self_test": (given(self_test={"z": X}), ConversionError, r"examples lack 'x' \(float32\[batch, 4\]\); they have"),
    "self_test's type": (
        given(self_test={"x": X + 1j}),
        ConversionError,
        "examples of 'x' are complex64, expected f",
    ),
    "self_test's shape": (
        given(self_test={"x": X[:, :3]}),
        ConversionError,
        r"examples of 'x' have the shape \[32, 3\], expected float32\[batch, 4\]",
    ),
    "an output": (
        analysis(Mean(name="light", of="z", low=0, high=1)),
        ConversionError,
        r"of='z', but the model's outputs are \['y'\]",
    ),
    "calibration's shape": (
        compression(StaticInt8(), calibration={"x": X[:, :3]}),
        CompressionError,
        r"calibration: input 'x' has the shape \['batch', 4\] with the examples first, got \[32, 3\]",
    ),
    "data's names": (
        compression(FineTune(), data={"z": X, "label": Y}),
        CompressionError,
        r"data: the model has the inputs \['x'\], got \['z'\]",
    ),
    "data without labels": (compression(FineTune(), data=X), CompressionError, "data: no labels; pass them under"),
}


@pytest.mark.parametrize("case", BEFORE)
def test_it_is_told_before_the_model_is_read(case: str, tmp_path: Path) -> None:
    wrong, error, text = BEFORE[case]
    with pytest.raises(error, match=text):
        convert(tmp_path / "absent.onnx", tmp_path / "b", **{**right(), **wrong()})
    assert Recording.applied == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", WITH_THE_MODEL)
def test_it_is_told_before_the_model_is_compressed(case: str, model: Model, tmp_path: Path) -> None:
    wrong, error, text = WITH_THE_MODEL[case]
    with pytest.raises(error, match=text):
        convert(model, tmp_path / "b", **{**right(), **wrong()})
    assert Recording.applied == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_right_is_compressed_once(model: Model, tmp_path: Path) -> None:
    bundle = convert(model, tmp_path / "b", **right())
    assert Recording.applied == ["ran"]
    assert {"predict", "evaluate", "train", "refresh", "finish"} <= set(bundle.manifest.programs)


def test_signing_is_asked_for(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"a bundle must be signed: pass signing=Signing\(key\)"):
        convert(model, tmp_path / "b")  # type: ignore[call-arg]


def test_a_source_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"source: expected a path .* got int"):
        convert(3, tmp_path / "b", **right())
    assert Recording.applied == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("there", "there: exists already; remove it or choose another name"),
        ("there/b.bundle", "there is not a folder; choose another path"),
        (3, "path: expected a path, got int 3"),
    ],
)
def test_a_path_that_cannot_be_written(path: Any, text: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("precious")
    with pytest.raises(ConversionError, match=text):
        convert(tmp_path / "absent.onnx", tmp_path / path if isinstance(path, str) else path, **right())
    assert Recording.applied == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConversionError, match="locked cannot be written to; choose another path"):
        convert(tmp_path / "absent.onnx", tmp_path / "locked" / "deep" / "b", **right())


def test_a_recipe_is_read_when_the_group_is_made(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[[part]]\nkind = "static_int8"\nsamples = 3\n')
    with pytest.raises(CompressionError, match=r"r.toml: part 1 \(static_int8\): no field 'samples'"):
        Compression(tmp_path / "r.toml", calibration=X)
    (tmp_path / "r.toml").write_text('[[part]]\nkind = "static_int8"\nexamples = 3\n')
    assert Compression(tmp_path / "r.toml", calibration=X).parts == (StaticInt8(examples=3),)


def test_factors_of_low_rank_may_be_named(model: Model, tmp_path: Path) -> None:
    """They are no parameters before the compression, and patterns for them match nothing then."""
    arguments = {
        **right(),
        "training": Training(LOSS, SGD, trainable=["head.left", "head.right"]),
        "compression": Compression([Recording(), LowRank(flops=0.1, layers="head")], calibration=X),
    }
    bundle = convert(model, tmp_path / "b", **arguments)
    assert {spec.name for spec in bundle.manifest.parameters} == {"head.left", "head.right"}
    Recording.applied.clear()
    with pytest.raises(GraphError, match="no parameter matches 'ghost'"):
        convert(model, tmp_path / "c", **{**arguments, "training": Training(LOSS, SGD, trainable="ghost")})
    assert Recording.applied == []


def test_a_batch_that_no_device_trains_with(tmp_path: Path) -> None:
    """Each example has a summand of its own, so the model takes no other batch than its file's."""
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> agraph (float[2, 4] x) => (float[2, 3] y)
        <float[2, 4] own = {0, 1, 2, 3, 4, 5, 6, 7}> { c = Add (x, own) y = MatMul (c, w) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w"))
    onnx.save(proto, tmp_path / "pairs.onnx")
    settings: dict[str, Any] = {"signing": Signing(KEY), "privacy": PRIVACY}
    with pytest.raises(ConversionError) as caught:
        convert(tmp_path / "pairs.onnx", tmp_path / "b", training=Training(LOSS, SGD), **settings)
    assert str(caught.value) == (
        "training: input 'x' takes batches of exactly 2, and devices train in batches of 16 (the batch stays 2, as in "
        "the source: Add 'node' has an input 'own' that is not the same for all examples); export the model with "
        "a dynamic batch axis (torch.onnx.export has dynamic_shapes=), or pass batch_size=2"
    )
    assert not (tmp_path / "b").exists()
    predicting = convert(tmp_path / "pairs.onnx", tmp_path / "predicting", **settings)
    assert predicting.program("predict").inputs[0].shape == (2, 4)
    trained = convert(tmp_path / "pairs.onnx", tmp_path / "b", training=Training(LOSS, SGD, batch_size=2), **settings)
    assert [phase.batch_size for phase in trained.manifest.schedule] == [2]
    # One example's share of 2 * 4 * 3 multiplications forward, and as many for each gradient, of w and own.
    assert (predicting.manifest.limits.flops_per_example, trained.manifest.limits.flops_per_example) == (24, 72)
