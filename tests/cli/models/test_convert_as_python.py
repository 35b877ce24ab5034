"""`archipel convert` with an option asks for what `convert` gets with the same argument, and makes the same bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from archipel import bundle as b
from archipel import convert
from archipel.converter import Analysis, Mean, Quantiles, Signing, Training
from archipel.converter.request import DEFAULT_PRIVACY, Request
from archipel.errors import ConversionError
from archipel.training import losses, optimizers, per_example, schedules, transforms

Command = Callable[..., tuple[str, str]]

SGD = optimizers.sgd(lr=0.05)
LOSS = losses.cross_entropy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution with BatchNormalization and a head, and a publisher's key."""
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(3)
    weights = {
        "conv.w": rng.standard_normal((4, 1, 3, 3)).astype(np.float32), "bn.scale": np.ones(4, np.float32),
        "bn.bias": np.zeros(4, np.float32), "bn.mean": np.zeros(4, np.float32), "bn.var": np.ones(4, np.float32),
        "head.w": rng.standard_normal((4, 3)).astype(np.float32), "head.b": np.zeros(3, np.float32),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "conv.w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "bn.scale", "bn.bias", "bn.mean", "bn.var"], ["n"], name="bn"),
        helper.make_node("Relu", ["n"], ["r"], name="relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["g"], name="pool"),
        helper.make_node("Flatten", ["g"], ["f"], name="flat"),
        helper.make_node("Gemm", ["f", "head.w", "head.b"], ["y"], name="head"),
    ]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["batch", 1, 6, 6])],
        [helper.make_tensor_value_info("y", 1, ["batch", 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, folder / "m.onnx")
    b.save_private_key(b.generate_key(), folder / "key")
    (folder / "policy.toml").write_text(POLICY)
    (folder / "analysis.toml").write_text(ANALYSIS)
    return folder


def training(loss: Any = LOSS, optimizer: Any = SGD, **options: Any) -> dict[str, Any]:
    return {"training": Training(loss, optimizer, **{"trainable": ["*"], **options})}


def of_strategy(name: str, **options: object) -> dict[str, Any]:
    return training(strategy=name, strategy_options=options)


def of_step(**options: Any) -> dict[str, Any]:
    return training(step_options=options)


CASES: dict[str, dict[str, Any]] = {
    # options beside --loss cross_entropy --lr 0.05: the arguments of `convert`
    "": training(),
    "--loss-option label_smoothing=0.1": training(losses.cross_entropy(label_smoothing=0.1)),
    "--loss-option class_weights=1,2,0.5": training(losses.cross_entropy(class_weights=[1, 2, 0.5])),
    "--momentum 0.9 --optimizer-option nesterov=true": training(
        optimizer=optimizers.sgd(lr=0.05, momentum=0.9, nesterov=True)
    ),
    "--optimizer adam --optimizer-option betas=0.8,0.99": training(optimizer=optimizers.adam(0.05, (0.8, 0.99))),
    "--optimizer rmsprop --momentum 0.5": training(optimizer=optimizers.rmsprop(0.05, momentum=0.5)),
    "--schedule cosine:steps=50,end=0.1": training(optimizer=optimizers.sgd(lr=schedules.cosine(0.05, 50, 0.1))),
    "--schedule cosine:steps=50 --schedule warmup:steps=5": training(
        optimizer=optimizers.sgd(lr=schedules.warmup(schedules.cosine(0.05, 50), 5))
    ),
    "--trainable head.*": training(trainable=["head.*"]),
    "--strategy fedprox --strategy-option mu=0.3": of_strategy("fedprox", mu=0.3),
    "--strategy-option clip=2 --strategy-option bits=20": of_strategy("fedavg", clip=2.0, bits=20),
    "--strategy-option clip=none --strategy-option value_range=0.5": of_strategy("fedavg", clip=None, value_range=0.5),
    "--strategy-option weight_cap=7": of_strategy("fedavg", weight_cap=7),
    "--strategy-option weighting=uniform": of_strategy("fedavg", weighting="uniform"),
    "--strategy-option statistics_range=5": of_strategy("fedavg", statistics_range=5.0),
    "--strategy fedrep --strategy-option personal=head.w,head.b --strategy-option personal_epochs=2": of_strategy(
        "fedrep", personal=["head.w", "head.b"], personal_epochs=2
    ),
    "--strategy dpsgd --strategy-option noise_multiplier=1.5 --batch-norm frozen": training(
        strategy="dpsgd", strategy_options={"noise_multiplier": 1.5}, step_options={"batch_norm": "frozen"}
    ),
    "--strategy scaffold --strategy-option control_clip=3": of_strategy("scaffold", control_clip=3.0),
    "--epochs 3 --batch-size 4": training(epochs=3, batch_size=4),
    "--loss-range 8": training(loss_range=8.0),
    "--loss-range 0": training(loss_range=None),
    "--loss-output y": training(loss_output="y"),
    "--batch-norm frozen": of_step(batch_norm="frozen"),
    "--batch-norm folded": of_step(batch_norm="folded"),
    "--no-dropout": of_step(dropout=False),
    "--accumulate 4": of_step(accumulate=4),
    "--precision mixed": of_step(precision="mixed"),
    "--kernels": of_step(kernels=True),
    "--transform clip_by_norm:max_norm=1 --transform proximal:mu=0.1,anchor=start": of_step(
        transforms=[transforms.clip_by_norm(1.0), transforms.proximal(0.1)]
    ),
    "--per-example clip=2 --per-example noise=0.5 --batch-norm frozen": of_step(
        per_example=per_example(2.0, 0.5), batch_norm="frozen"
    ),
}


POLICY = """
min_cohort = 4
modes = ["secure", "plain"]
"""
ANALYSIS = """
max_examples = 200
[[statistic]]
kind = "mean"
name = "score"
low = 0
high = 1
of = "y"
[[statistic]]
kind = "quantiles"
name = "spread"
edges = [-1, 0, 1.5]
probabilities = [0.5]
"""
DIGEST = "ab" * 32


def default_policy(**fields: Any) -> dict[str, Any]:
    return {"privacy": msgspec.structs.replace(DEFAULT_PRIVACY, **fields)}


CASES |= {
    "--policy-option min_cohort=3 --policy-option modes=secure,plain": default_policy(
        min_cohort=3, modes=("secure", "plain")
    ),
    "--policy-option threshold=0.8 --policy-option max_clip=5 --policy-option max_bits=20": default_policy(
        threshold=0.8, max_clip=5.0, max_bits=20
    ),
    "--policy-option colluders=0 --policy-option min_contributors=3 --policy-option queries=5": default_policy(
        colluders=0.0, min_contributors=3, queries=5
    ),
    "--policy-option query_days=7 --policy-option max_value=10 --policy-option max_server_lr=2": default_policy(
        query_days=7, max_value=10.0, max_server_lr=2.0
    ),
    "--policy-option weighting=uniform": default_policy(weighting="uniform"),
    "--policy-option protocols=neighbours-mlkem": default_policy(protocols=("neighbours-mlkem",)),
    "--policy-option protocols=complete --policy-option dropouts=0.1": default_policy(
        protocols=("complete",), dropouts=0.1
    ),
    "--policy-option server=semi-honest": default_policy(server="semi-honest"),
    "--policy policy.toml --policy-option min_cohort=5": default_policy(min_cohort=5, modes=("secure", "plain")),
    "--policy policy.toml": default_policy(min_cohort=4, modes=("secure", "plain")),
    "--name rain": {"name": "rain"},
}
ANALYSES: dict[str, dict[str, Any]] = {
    "--analysis analysis.toml": {
        "analysis": Analysis(
            [
                Mean(name="score", low=0, high=1, of="y"),
                Quantiles(name="spread", edges=[-1, 0, 1.5], probabilities=[0.5]),
            ],
            max_examples=200,
        )
    }
}


BUNDLES = (
    "--policy-option min_cohort=3 --policy-option modes=secure,plain",
    "--schedule cosine:steps=50 --schedule warmup:steps=5",
    "--strategy-option clip=2 --strategy-option bits=20",
    "--strategy dpsgd --strategy-option noise_multiplier=1.5 --batch-norm frozen",
    "--transform clip_by_norm:max_norm=1 --transform proximal:mu=0.1,anchor=start",
)
"""Those of which whole bundles are compared."""


def comparable(value: Any) -> Any:
    """Lists and tuples, which mean the same in arguments, as tuples."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: comparable(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return type(value), fields
    if isinstance(value, Mapping):
        return {name: comparable(each) for name, each in value.items()}
    return tuple(map(comparable, value)) if isinstance(value, list | tuple) else value


def command(folder: Path, path: Path, options: str) -> list[str]:
    trained = [] if options in ANALYSES else ["--loss", "cross_entropy", "--lr", "0.05"]
    return ["convert", str(folder / "m.onnx"), "-o", str(path), "--key", str(folder / "key"), *trained,
            *options.split()]  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that the command made, none of which it carries out."""
    requests: list[Request] = []

    def note(request: Request) -> b.Bundle:
        requests.append(request)
        raise ConversionError("noted")

    monkeypatch.setattr("archipel.cli.models.convert.command.make_bundle", note)
    return requests


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("options", [*CASES, *ANALYSES])
def test_an_option_asks_for_what_the_argument_does(
    options: str, archipel: Command, folder: Path, tmp_path: Path, asked: list[Request]
) -> None:
    archipel(*command(folder, tmp_path / "m.bundle", options), code=1)
    given = {**CASES, **ANALYSES}[options]
    plain = {**CASES[""], "privacy": DEFAULT_PRIVACY, "analysis": None, "name": None}
    if options in ANALYSES:
        plain["training"] = None
    for name, value in {**plain, **given}.items():
        assert comparable(getattr(asked[0], name)) == comparable(value)
    assert not options or any(value != plain[name] for name, value in given.items())


def test_the_noise_for_a_target(archipel: Command, folder: Path, tmp_path: Path, asked: list[Request]) -> None:
    options = "--strategy dpsgd --batch-norm frozen --epochs 2 --target-epsilon 37.42181 --target-rounds 50"
    archipel(*command(folder, tmp_path / "m.bundle", options), code=1)
    assert asked[0].training is not None
    # dp-accounting's epsilon of 100 passes with a multiplier of 2, see tests/client/memory/test_epsilon.py.
    assert asked[0].training.strategy_options["noise_multiplier"] == pytest.approx(2.0, rel=1e-4)


@pytest.mark.sampled(every=3)
def test_the_notes_say_what_a_round_costs(archipel: Command, folder: Path, tmp_path: Path) -> None:
    out, _ = archipel(*command(folder, tmp_path / "m.bundle", "--strategy dpsgd --batch-norm frozen"))
    # dp-accounting's epsilons with a multiplier of 1, see there.
    assert "note: noise: each example costs an epsilon of 5.22 in one round, 20.6 in 10 rounds" in out


def test_who_may_use_it_until_when(archipel: Command, folder: Path, tmp_path: Path, asked: list[Request]) -> None:
    options = f"--population staff --population pupils --sequence 3 --parent {DIGEST} --valid-days 0"
    archipel(*command(folder, tmp_path / "m.bundle", options), code=1)
    signing = asked[0].signing
    assert (signing.populations, signing.sequence, signing.parent) == (("staff", "pupils"), 3, DIGEST)
    assert signing.end == 0


def test_examples_for_the_self_test(archipel: Command, folder: Path, tmp_path: Path, asked: list[Request]) -> None:
    x = np.ones((2, 1, 6, 6), np.float32)
    np.savez(tmp_path / "test.npz", x=x)
    archipel(*command(folder, tmp_path / "m.bundle", f"--self-test {tmp_path / 'test.npz'}"), code=1)
    examples = asked[0].self_test
    assert examples is not None
    np.testing.assert_array_equal(examples["x"], x)


@pytest.mark.parametrize("options", [*BUNDLES, *ANALYSES])
@pytest.mark.sampled(every=6)
def test_an_option_makes_the_bundle_of_the_argument(
    options: str, archipel: Command, folder: Path, tmp_path: Path
) -> None:
    archipel(*command(folder, tmp_path / "m.bundle", options))
    key = b.load_private_key(folder / "key")
    arguments = {**CASES, **ANALYSES}[options]
    if options not in ANALYSES:
        arguments = {**CASES[""], **arguments}
    expected = convert(folder / "m.onnx", tmp_path / "python" / "m.bundle", signing=Signing(key), **arguments)
    made = b.open_bundle(tmp_path / "m.bundle", [key.public_key().public_bytes_raw()], cache=tmp_path / "cache")
    # The manifest holds the digest of every graph and of the weights.
    assert made.manifest == expected.manifest
