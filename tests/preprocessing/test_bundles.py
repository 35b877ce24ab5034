"""Devices that take raw sound: bundles whose programs begin with a spectrogram."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from archipel import Model, lite_runtime
from archipel.bundle import generate_key
from archipel.bundle.roles import Example, Feature
from archipel.compression import DynamicInt8, Float16, LowRank, PruneChannels, StaticInt8, WeightOnly, compress
from archipel.compression.deploy import deploy
from archipel.compression.part import Part
from archipel.converter import Signing, Training, convert
from archipel.preprocessing import Layout, LogMel, Normalize, Raw, Scale, Transform, chain, fitted, put_before
from archipel.training import StepRunner, losses, optimizers, per_example, step_graph
from tests.preprocessing.cases import run

KEY = generate_key()
RAW = Raw("int16", ("batch", 2000))
TONES = 4


def sounds(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tones of four pitches in noise, int16 [count, 2000], and which."""
    rng = np.random.default_rng(seed)
    label = np.arange(count) % TONES
    turns = np.arange(2000) / 16000 * 400.0 * 2 ** label[:, None] + rng.random((count, 1))
    loudness = rng.uniform(1000, 9000, (count, 1))
    noise = rng.normal(0, 500, (count, 2000))
    return (loudness * np.sin(2 * np.pi * turns) + noise).astype(np.int16), label


@pytest.fixture(scope="module")
def network() -> Model:
    """Written, as an export by PyTorch takes seconds."""
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> net (float[batch, 1, 12, 24] x) => (float[batch, 4] y) {'
        " c = Conv (x, kernel) r = Relu (c) p = GlobalAveragePool (r) f = Flatten (p)"
        " y = Gemm <transB = 1> (f, weight, bias) }"
    )
    rng = np.random.default_rng(0)
    shapes = {"kernel": (16, 1, 3, 24), "weight": (TONES, 16), "bias": (TONES,)}
    for name, shape in shapes.items():
        content = (rng.uniform(-1, 1, shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(content, name))
    return Model.from_proto(proto, list(shapes))


@pytest.fixture(scope="module")
def transforms() -> list[Transform]:
    mel = LogMel(points=256, hop=155, bands=24)
    return fitted([RAW, Scale(32768), mel, Normalize(axis=1), Layout("NFT", "N1TF")], sounds(64, 1)[0])


@pytest.mark.sampled(every=3)
def test_a_device_trains_on_raw_sound(network: Model, transforms: list[Transform], tmp_path: Path) -> None:
    model = put_before(network, transforms)
    training = Training(losses.cross_entropy(), optimizers.adam(lr=0.03), batch_size=16)
    bundle = convert(model, tmp_path / "tones.bundle", signing=Signing(KEY), training=training)
    programs = bundle.manifest.programs
    # Preparation is part of `features`, so it is computed once for each example and not in every epoch.
    (raw,) = [port for port in programs["features"].inputs if isinstance(port, Example)]
    assert (raw.name, raw.dtype, raw.shape) == (model.inputs[0].name, "int16", ("batch", 2000))
    assert [port.shape for port in programs["train"].inputs if isinstance(port, Feature)] == [("batch", 1, 12, 24)]
    assert not any(isinstance(port, Example) for port in programs["train"].inputs)
    assert "STFT" not in {node.op_type for node in model.ir.graph}
    sound, label = sounds(64, 2)
    runtime = lite_runtime.load(tmp_path / "tones.bundle", trusted_keys=[KEY.public_key().public_bytes_raw()])
    prepared = run(chain(transforms), sound)
    (answer,) = runtime.predict({raw.name: sound}).values()
    np.testing.assert_allclose(answer, run(network, prepared), rtol=1e-4, atol=1e-4)
    before = runtime.evaluate({raw.name: sound, "label": label})
    runtime.fit({raw.name: sounds(64, 3)[0], "label": sounds(64, 3)[1]}, epochs=20)
    after = runtime.evaluate({raw.name: sound, "label": label})
    assert after["loss"] < 0.3 * before["loss"]
    assert after["correct"] >= 60
    # The kernels of the spectrogram, 129 x 2 x 256 numbers, are not in the file.
    assert (bundle.folder / "weights.safetensors").stat().st_size < 129 * 2 * 256 * 2


@pytest.mark.parametrize(
    "part",
    [
        StaticInt8(),
        DynamicInt8(),
        WeightOnly(),
        Float16(compute="float16"),
        # Half of the network's work, of which the transforms have many times as much.
        PruneChannels(flops=0.5, criterion="l1"),
        LowRank(flops=0.3),
    ],
    ids=lambda part: type(part).__name__,
)
@pytest.mark.sampled(every=6)
def test_compression_leaves_preparation_as_it_is(network: Model, transforms: list[Transform], part: Part) -> None:
    """What is compressed with transforms in front answers as what is compressed alone does to prepared examples."""
    sound, _ = sounds(16, 4)
    prepared = run(chain(transforms), sound)
    model = put_before(network, transforms)
    joined, alone = (
        deploy(compress(each, [part], calibration=examples)[0]).predict
        for each, examples in ((model, sound), (network, prepared))
    )
    answer, wanted = run(joined, sound), run(alone, prepared)
    exact = run(network, prepared)
    assert np.abs(wanted - exact).max() > 1e-5 * np.abs(exact).max()  # the part does change the network
    np.testing.assert_allclose(answer, wanted, atol=2e-3 * np.abs(exact).max())


@pytest.mark.sampled(every=4)
def test_gradients_of_single_examples_are_those_of_the_batch(network: Model, transforms: list[Transform]) -> None:
    """With a norm that clips nothing: the lanes of examples go through the spectrogram, too."""
    sound, label = sounds(8, 5)
    model, after = put_before(network, transforms), []
    for single in (None, per_example(clip=1e6)):
        runner = StepRunner(
            step_graph(model, losses.cross_entropy(), optimizers.sgd(), per_example=single), {"lr": 1.0}
        )
        runner.step((sound, label))
        after.append(runner.tensors)
    for name in model.parameter_names:
        np.testing.assert_allclose(after[1][name], after[0][name], rtol=1e-4, atol=1e-5)


def test_mixed_precision_leaves_preparation_as_it_is(network: Model, transforms: list[Transform]) -> None:
    step = step_graph(put_before(network, transforms), losses.cross_entropy(), optimizers.sgd(), precision="mixed")
    plain = step_graph(network, losses.cross_entropy(), optimizers.sgd(), precision="mixed")
    halves = [sum(node.op_type == "Cast" for node in each.ir.graph.all_nodes()) for each in (step, plain)]
    assert halves[0] == halves[1] + 1  # int16 to float32
