"""K steps in one graph against K calls of the program of one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch

from archipel import Model, models, training
from archipel import bundle as b
from archipel.bundle import roles
from archipel.converter.repeated import repeated
from archipel.converter.weights import share_weights
from archipel.errors import ConversionError, ManifestError
from archipel.graph import check_model
from archipel.training import StepRunner, losses, optimizers, transforms

KEY = b.generate_key()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.from_torch(models.lenet(0, classes=4), torch.zeros(2, 1, 28, 28))


@pytest.fixture(scope="module")
def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((5, 1, 28, 28), np.float32), rng.integers(0, 4, 5)) for _ in range(6)]


def make(model: Model, **options: Any) -> Model:
    optimizer = options.pop("optimizer", optimizers.sgd(momentum=0.9))
    return training.step_graph(model, losses.cross_entropy(), optimizer, **options)


@pytest.mark.parametrize(
    ("options", "apart"),
    [
        ({}, 1e-6),
        # Adam divides a gradient near 0 by its own size, and with it what rounding makes of it.
        ({"optimizer": optimizers.adam(lr=0.01), "trainable": "hidden*"}, 1e-4),
        ({"transforms": [transforms.clip_by_norm(0.1), transforms.proximal(0.3)], "accumulate": 2}, 1e-6),
    ],
    ids=["momentum", "adam on a part", "accumulated, proximal"],
)
@pytest.mark.sampled(every=4)
def test_the_same_steps(model: Model, batches: list, options: dict, apart: float) -> None:
    once = make(model, **options)
    three = repeated(once, 3)
    check_model(three.ir)
    single, several = StepRunner(once), StepRunner(three)
    expected = [single.step(batch)["loss"] for batch in batches]
    found = [metrics["loss"] for i in (0, 3) for metrics in several.run(batches[i : i + 3])]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert single.tensors.keys() == several.tensors.keys()
    for name, value in single.tensors.items():
        np.testing.assert_allclose(several.tensors[name], value, atol=apart, err_msg=name)


def test_the_program_itself_stays(model: Model) -> None:
    once = make(model)
    before, signature = once.to_bytes(), once.signature
    repeated(once, 4)
    assert (once.to_bytes(), once.signature) == (before, signature)


def write(folder: Path, programs: dict[str, Model]) -> b.Bundle:
    parameters = programs["train"].initial
    graphs, weights = share_weights(programs, parameters)
    return b.write_bundle(
        folder,
        name="repeated",
        programs={n: msgspec.structs.replace(p.signature, file=f"{n}.onnx") for n, p in programs.items()},
        graphs={f"{name}.onnx": graph for name, graph in graphs.items()},
        weights=weights,
        parameters=b.parameter_specs(parameters, list(parameters)),
        limits=b.Limits(peak_bytes=1, flops_per_example=1, upload_bytes=1),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=24),
        key=KEY,
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"per_example": training.per_example(0.1, noise=1.0)}, {"accumulate": 2, "optimizer": optimizers.adam()}],
    ids=["plain", "noise", "accumulated"],
)
@pytest.mark.sampled(every=6)
def test_a_bundle_takes_it(model: Model, options: dict, tmp_path: Path) -> None:
    """The manifest's validation compares every port with that of the program of one step."""
    once = make(model, **options)
    four = repeated(once, 4)
    bundle = write(tmp_path / "bundle", {"train": once, "train_4": four})
    assert bundle.manifest.programs["train_4"].repeats == "train"
    assert bundle.manifest.programs["train_4"].steps == 4
    for ports, infos in ((four.signature.inputs, four.inputs), (four.signature.outputs, four.outputs)):
        assert [(p.name, p.dtype, p.shape) for p in ports] == [(i.name, i.dtype, i.shape) for i in infos]
    # Its weights are those of the other program: the file has every tensor once.
    assert len((bundle.folder / "weights.safetensors").read_bytes()) < 1.1 * sum(
        value.nbytes for value in once.initial.values()
    )
    with pytest.raises(ManifestError, match="repeats 'head', which"):
        write(tmp_path / "other", {"train": once, "train_4": repeated(once, 4, "head")})


TEXT = """agraph (float[batch, 2] x, float[2] w, {more}) => (float[2] v, float loss{also}) {{
    m = ReduceMean<keepdims = 0>(x) loss = Identity(m) {body} }}"""


def written(more: str, body: str, also: str, ports: list[roles.Port], outputs: list[roles.Port]) -> Model:
    """A train program in ONNX's text form: v = w + what `more` gives."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> ' + TEXT.format(more=more, body=body, also=also)
    )
    program = Model.from_proto(proto, parameters=[])
    program.signature = roles.Program(
        kind="train",
        inputs=(
            roles.Example(name="x", dtype="float32", shape=("batch", 2)),
            roles.Parameter(name="w", dtype="float32", shape=(2,), tensor="w"),
            *ports,
        ),
        outputs=(
            roles.Parameter(name="v", dtype="float32", shape=(2,), tensor="w"),
            roles.Metric(name="loss", dtype="float32", shape=(), reduction="mean"),
            *outputs,
        ),
    )
    return program


def counting(of: str) -> Model:
    port = roles.Count(name="n", dtype="int64", shape=(), of=of)
    return written("int64 n", "f = Cast<to = 1>(n) v = Add(w, f)", "", [port], [])


def remembering(lifetime: str) -> Model:
    state = {"dtype": "float32", "shape": (), "tensor": "s", "lifetime": lifetime}
    return written("float s", "v = Add(w, s) t = Add(s, m)", ", float t", [roles.State(name="s", **state)],
                   [roles.State(name="t", **state)])  # fmt: skip


def writing_only() -> Model:
    port = roles.Personal(name="p", dtype="float32", shape=(), tensor="p")
    return written("float lr", "v = Add(w, lr) p = Neg(m)", ", float p",
                   [roles.Hyperparameter(name="lr", dtype="float32", shape=(), default=1, minimum=0, maximum=2)],
                   [port])  # fmt: skip


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: counting("steps"), "input 'n' counts the steps, a number that stays"),
        (lambda: remembering("step"), "state 's' starts anew with every step"),
        (writing_only, "output 'p' writes 'p', which the program does not read"),
    ],
    ids=["count of steps", "state of a step", "written only"],
)
def test_programs_that_it_would_not_be_the_same_for(program: Callable[[], Model], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        repeated(program(), 2)


@pytest.mark.parametrize("program", [lambda: counting("examples"), lambda: remembering("round")])
def test_their_neighbours_are_taken(program: Callable[[], Model]) -> None:
    assert repeated(program(), 2).signature.steps == 2


def test_arguments(model: Model) -> None:
    once = make(model, trainable="output.*")
    for steps in (1, 0, True, 2.0):
        with pytest.raises(ConversionError, match="steps must be a whole number of 2 or more"):
            repeated(once, steps)
    with pytest.raises(ConversionError, match="expected a train program of one step"):
        repeated(repeated(once, 2), 2)
    with pytest.raises(ConversionError, match="expected a train program of one step"):
        repeated(model, 2)
