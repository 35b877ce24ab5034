"""What every part of a recipe must keep, on every network of the zoo: a valid graph, the signature, gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache

import numpy as np
import onnxruntime
import pytest
import torch

from archipel import Model, models, training
from archipel.compression import (
    CompressedModel,
    Distil,
    DynamicInt8,
    Examples,
    FineTune,
    Float16,
    LowRank,
    PruneChannels,
    PruneNM,
    PruneWeights,
    QuantizationAware,
    StaticInt8,
    WeightOnly,
    Work,
    compress,
)
from archipel.compression.part import Part
from archipel.compression.recipe import PARTS, kind_of, parse_recipe, write_recipe
from archipel.errors import CompressionError
from archipel.graph.check import check_model
from archipel.lite_runtime.engines.onnx_runtime import open_exact

Fields = tuple[np.ndarray, np.ndarray]


def pictures(*shape: int, classes: int = 10) -> Callable[[], Fields]:
    def made() -> Fields:
        rng = np.random.default_rng(0)
        return rng.standard_normal((48, *shape), np.float32), rng.integers(0, classes, 48)

    return made


def text() -> Fields:
    rng = np.random.default_rng(0)
    return rng.integers(0, 40, (48, 12)), rng.integers(0, 40, (48, 12))


def same() -> Fields:
    x = np.random.default_rng(0).random((48, 1, 28, 28), np.float32)
    return x, x


def masks() -> Fields:
    rng = np.random.default_rng(0)
    return rng.standard_normal((48, 1, 32, 32), np.float32), rng.integers(0, 2, (48, 32, 32))


ZOO: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Fields]]] = {
    "mlp": (lambda: models.mlp(0), pictures(784)),
    "digits_cnn": (lambda: models.digits_cnn(0), pictures(1, 28, 28)),
    "lenet": (lambda: models.lenet(0), pictures(1, 28, 28)),
    "fedavg_cnn": (lambda: models.fedavg_cnn(0), pictures(1, 28, 28)),
    "cnn_1d": (lambda: models.cnn_1d(0), pictures(6, 128, classes=6)),
    "resnet8": (lambda: models.resnet8(0), pictures(3, 32, 32)),
    "ds_cnn": (lambda: models.ds_cnn(0, filters=16, blocks=1), pictures(1, 49, 10, classes=12)),
    "mobilenet_v2": (lambda: models.mobilenet_v2(0, width=0.25), pictures(3, 32, 32)),
    "autoencoder": (lambda: models.autoencoder(0), same),
    "unet": (lambda: models.unet(0), masks),
    "char_rnn": (lambda: models.char_rnn(0, hidden=32), text),
    "transformer": (lambda: models.transformer(0), text),
}

QUICK = defaultdict(
    lambda: ("digits_cnn",),
    prune_channels=("char_rnn",), static_int8=("ds_cnn",), quantization_aware=("ds_cnn",), dynamic_int8=("ds_cnn",),
    weight_only=("char_rnn",), low_rank=("ds_cnn",), prune_nm=("char_rnn",),
)  # fmt: skip
"""By kind of part the networks of the short suite: a plain one, one with BatchNormalization, a recurrent one."""

DEEP = ("unet", "mobilenet_v2")
"""A value that another order of sums moves across a tie is a step further on, and moves more in the next layer. Behind
ten and fifty layers of untrained weights, normalized each time, the two ways to compute it are as far from each other
as rounding has brought them from the float network, but never further. (Trained, MobileNetV2 keeps the bound of the
others.)"""

RECIPES = {
    "fine_tune": 'kind = "fine_tune"\nsteps = 2\nbatch_size = 8',
    "static_int8": 'kind = "static_int8"\nexamples = 16',
    "prune_channels": 'kind = "prune_channels"\nratio = 0.25\ncriterion = "l2"',
    "prune_weights": 'kind = "prune_weights"\nsparsity = 0.5',
    "prune_nm": 'kind = "prune_nm"',
    "low_rank": 'kind = "low_rank"\nenergy = 0.8',
    "distil": 'kind = "distil"\n[part.fine_tune]\nsteps = 2\nbatch_size = 8',
    "quantization_aware": 'kind = "static_int8"\nexamples = 16\n[[part]]\nkind = "quantization_aware"\n'
    "[part.fine_tune]\nsteps = 2\nbatch_size = 8",
    "dynamic_int8": 'kind = "dynamic_int8"\nconvolutions = true',
    "weight_only": 'kind = "weight_only"\nbits = 4',
    "float16": 'kind = "float16"',
}


@cache
def network(name: str) -> tuple[Model, Fields]:
    """Untrained, but normalized by statistics of its data: with those it begins with, deep networks answer next to
    nothing, and their gradients are below what a weight can be moved by."""
    make, data = ZOO[name]
    fields, module = data(), make()
    norms = [each for each in module.modules() if isinstance(each, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean over all that is seen
    if norms:
        with torch.no_grad():
            module.train()(torch.from_numpy(fields[0]))
    for norm in norms:
        norm.momentum = 0.1
    return Model.from_torch(module.eval(), torch.from_numpy(fields[0][:2])), fields


def cases() -> list[object]:
    return [
        pytest.param(kind, name, marks=[] if name in QUICK[kind] else pytest.mark.slow, id=f"{kind}-{name}")
        for kind in RECIPES
        for name in ZOO
    ]


def test_every_part_is_here() -> None:
    assert {kind_of(part) for part in PARTS} == set(RECIPES)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_survives_its_file(kind: str) -> None:
    recipe = parse_recipe(f"[[part]]\n{RECIPES[kind]}\n")
    assert parse_recipe(write_recipe(recipe)) == recipe
    assert all(hash(part) is not None for part in recipe)  # frozen, and made of values


NEEDS: list[tuple[Part, tuple[str, ...]]] = [
    (PruneChannels(ratio=0.5), ("data",)),
    (PruneChannels(flops=0.5, criterion="l1"), ()),
    (PruneChannels(flops=0.5, criterion="l1", fine_tune=FineTune()), ("data",)),
    (PruneChannels(latency=0.5, criterion="l2"), ("calibration",)),
    (PruneChannels(latency=0.5), ("data", "calibration")),
    (LowRank(energy=0.9), ("calibration",)),
    (LowRank(energy=0.9, data_aware=False), ()),
    (LowRank(energy=0.9, fine_tune=FineTune()), ("data", "calibration")),
    (Distil(), ("data",)),
    (FineTune(), ("data",)),
    (PruneWeights(), ()),
    (PruneWeights(criterion="taylor"), ("data",)),
    (PruneWeights(fine_tune=FineTune()), ("data",)),
    (PruneNM(), ()),
    (PruneNM(criterion="taylor"), ("data",)),
    (PruneNM(fine_tune=FineTune()), ("data",)),
    (StaticInt8(), ("calibration",)),
    (StaticInt8(max_drop=1.0), ("calibration", "validation")),
    (QuantizationAware(), ("data",)),
    (DynamicInt8(), ()),
    (WeightOnly(), ()),
    (WeightOnly(rounding="adaround"), ("calibration",)),
    (Float16(), ()),
]


def test_what_parts_need() -> None:
    assert {type(part) for part, _ in NEEDS} == set(PARTS)
    for part, needs in NEEDS:
        assert part.needs == needs, part


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("kind", RECIPES)
def test_a_part_runs_with_what_it_says_it_needs_and_not_without(kind: str) -> None:
    model, (x, y) = network(QUICK[kind][0])
    loss = training.losses.cross_entropy(axis=-1 if QUICK[kind][0] == "char_rnn" else 1)
    examples = Examples.of((x, y), model, "data", labelled=True)
    current = CompressedModel.of(model)
    for part in parse_recipe(f"[[part]]\n{RECIPES[kind]}\n"):
        if part.needs:
            with pytest.raises(CompressionError, match=r"needs (training|calibration|validation) data"):
                part.apply(current, Work(model, loss=loss))
        current = part.apply(current, Work(model, loss=loss, **dict.fromkeys(part.needs, examples)))


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(("kind", "name"), cases())
def test_what_every_part_keeps(kind: str, name: str) -> None:
    model, (x, y) = network(name)
    nodes, weights = [node.op_type for node in model.ir.graph], {n: v.copy() for n, v in model.parameters.items()}
    loss = training.losses.cross_entropy() if y.dtype.kind == "i" else training.losses.mse()
    if name in ("char_rnn", "transformer"):
        loss = training.losses.cross_entropy(axis=-1)
    recipe = parse_recipe(f"[[part]]\n{RECIPES[kind]}\n")
    small, report = compress(model, recipe, data=(x, y), validation=(x, y), loss=loss)
    assert [node.op_type for node in model.ir.graph] == nodes  # the model that was given stays as it is
    assert all(np.array_equal(model.parameters[tensor], value) for tensor, value in weights.items())

    deployed = small.deployed()
    for graph in (small, deployed):
        assert (graph.inputs, graph.outputs) == (model.inputs, model.outputs)
        check_model(graph.ir)
    # The simulation as it is written: ONNX Runtime would put kernels of its own in the place of what it recognizes.
    simulated, ran = run(small, x[:8], optimized=False), run(deployed, x[:8])
    assert ran.shape == simulated.shape
    assert np.isfinite(ran).all()
    # Devices run what was simulated: as far apart as a different order of float sums, or one step of 8 bits.
    quantized = kind in ("static_int8", "quantization_aware", "dynamic_int8")
    bound = (2e-2 if quantized else 2e-3) * np.abs(simulated).max()
    if quantized and name in DEEP and small.training_form is not None:
        bound = np.abs(simulated - run(small.training_form, x[:8])).max()
    assert np.abs(ran - simulated).max() <= bound
    assert 0.5 * len(deployed.to_bytes()) < report.after.nbytes <= len(deployed.to_bytes())

    step = training.step_graph(small, loss, training.optimizers.sgd(lr=0.01), list(small.trainable_names),
                               batch_norm="frozen")  # fmt: skip
    check_model(step.ir)
    runner = training.StepRunner(step)
    start = {tensor: value.copy() for tensor, value in runner.tensors.items()}
    first = runner.step({small.inputs[0].name: x[:8], "label": y[:8]})["loss"]
    assert np.isfinite(first)
    moved = [tensor for tensor in small.trainable_names if not np.array_equal(start[tensor], runner.tensors[tensor])]
    assert len(moved) >= 0.5 * len(small.trainable_names)
    assert isinstance(small.with_parameters({t: runner.tensors[t] for t in small.trainable_names}), CompressedModel)


def run(model: Model, x: np.ndarray, optimized: bool = True) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_exact(model.to_bytes(), options)
    return session.run(None, {model.inputs[0].name: x})[0]  # type: ignore[no-any-return]
