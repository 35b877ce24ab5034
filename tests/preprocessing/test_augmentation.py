"""Random changes of training examples: what a device's steps and PyTorch draw, and that nothing else has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from archipel import Model
from archipel.bundle import generate_key
from archipel.compression.deploy import deploy
from archipel.converter import Signing, Training, convert
from archipel.errors import PreprocessingError
from archipel.preprocessing import (
    RandomFlip,
    RandomGain,
    RandomMask,
    RandomNoise,
    RandomShift,
    Raw,
    Scale,
    Transform,
    chain,
    put_before,
)
from archipel.training import StepRunner, losses, optimizers, per_example, step_graph
from archipel.training.cloud import TorchModule
from tests.preprocessing.cases import run

PICTURE = np.random.default_rng(0).normal(size=(1, 6, 7, 2)).astype(np.float32)
RAW = Raw("float32", ("batch", 6, 7, 2))
DRAWS = 60
Draw = Callable[[Transform], np.ndarray]


def linear() -> Model:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> agraph (float[batch, 6, 7, 2] x) => (float[batch, 1] y) '
        "{ flat = Flatten (x) y = MatMul (flat, kernel) }"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((84, 1), np.float32), "kernel"))
    return Model.from_proto(proto, ["kernel"])


def device(transform: Transform, engine: str = "onnxruntime") -> np.ndarray:
    """What the steps of a device see, [DRAWS, 6, 7, 2].

    With weights of zeros, a label of 1/2 and a learning rate of 1, a step of least squares makes the weights equal to
    the one example of its batch.
    """
    step = step_graph(put_before(linear(), [RAW, transform]), losses.mse(), optimizers.sgd(lr=1.0))
    runner = StepRunner(step, {"lr": 1.0}, 5, engine=engine)
    seen = []
    for number in range(DRAWS):
        runner.resume({"kernel": np.zeros((84, 1), np.float32)}, number)
        runner.step((PICTURE, np.full((1, 1), 0.5, np.float32)))
        seen.append(np.asarray(runner.tensors["kernel"]).reshape(PICTURE.shape[1:]))
    return np.stack(seen)


def cloud(transform: Transform) -> np.ndarray:
    """What PyTorch's training sees: a batch of equal examples, each with draws of its own."""
    torch.manual_seed(3)
    module = TorchModule(chain([RAW, transform])).train()
    return module(torch.tensor(np.repeat(PICTURE, DRAWS, axis=0))).numpy()


both = pytest.mark.parametrize("draw", [device, cloud], ids=["device", "cloud"])


@both
def test_flip(draw: Draw) -> None:
    seen = draw(RandomFlip(probability=0.5))
    flipped = [np.allclose(each, PICTURE[0, :, ::-1], atol=1e-6) for each in seen]
    assert all(turned or np.allclose(each, PICTURE[0], atol=1e-6) for turned, each in zip(flipped, seen))
    assert 15 <= sum(flipped) <= 45  # 5 standard deviations of a fair coin are 19


@pytest.mark.sampled(every=3)
@both
def test_shift(draw: Draw) -> None:
    seen = draw(RandomShift(2, axes=(1, 2)))
    found = set()
    for each in seen:
        places = [
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if np.allclose(each, moved(moved(PICTURE[0], down, 0), right, 1), atol=1e-6)
        ]
        assert len(places) == 1
        found.update(places)
    assert {down for down, _ in found} == {right for _, right in found} == {-2, -1, 0, 1, 2}
    assert len(found) > 10  # the axes do not go together


@both
def test_shift_that_fills(draw: Draw) -> None:
    found = set()
    for each in draw(RandomShift(2, axes=(2,), fill=0.5)):
        places = [by for by in range(-2, 3) if np.allclose(each, moved(PICTURE[0], by, 1, 0.5), atol=1e-6)]
        assert len(places) == 1
        found.update(places)
    assert found == {-2, -1, 0, 1, 2}


@both
def test_shift_that_reflects(draw: Draw) -> None:
    """As PyTorch's functional.pad with the mode "reflect", and a cut."""
    found = set()
    for each in draw(RandomShift(2, axes=(1,), fill="reflect")):
        places = [by for by in range(-2, 3) if np.allclose(each, moved(PICTURE[0], by, 0, "reflect"), atol=1e-6)]
        assert len(places) == 1
        found.update(places)
    assert found == {-2, -1, 0, 1, 2}


def test_a_reflection_as_large_as_the_picture_is_refused() -> None:
    with pytest.raises(PreprocessingError, match="most is below 6, the size of axis 1"):
        chain([RAW, RandomShift(6, axes=(1,), fill="reflect")])
    with pytest.raises(PreprocessingError, match='fill is a number or "reflect"'):
        chain([RAW, RandomShift(2, fill="mirror")])  # type: ignore[arg-type]


def moved(picture: np.ndarray, places: int, axis: int, fill: float | str | None = None) -> np.ndarray:
    """By padding with the border or `fill`, and cutting."""
    widths = [(2, 2) if i == axis else (0, 0) for i in range(3)]
    if fill == "reflect":
        axes = torch.from_numpy(np.moveaxis(picture, axis, -1).copy())
        padded = np.moveaxis(torch.nn.functional.pad(axes, (2, 2), mode="reflect").numpy(), -1, axis)
    elif fill is None:
        padded = np.pad(picture, widths, mode="edge")
    else:
        padded = np.pad(picture, widths, constant_values=fill)
    return np.take(padded, np.arange(picture.shape[axis]) + 2 - places, axis=axis)


@both
def test_gain(draw: Draw) -> None:
    gains = draw(RandomGain(0.5, 2.0)) / PICTURE
    each = gains.mean(axis=(1, 2, 3))
    np.testing.assert_allclose(gains, np.broadcast_to(each[:, None, None, None], gains.shape), rtol=1e-4)
    assert 0.5 <= each.min() < 0.7
    assert 1.8 < each.max() <= 2.0
    assert abs(each.mean() - 1.25) < 5 * 1.5 / np.sqrt(12 * DRAWS)


@both
def test_gain_of_each_channel(draw: Draw) -> None:
    gains = draw(RandomGain(0.5, 2.0, axis=-1)) / PICTURE
    each = gains.mean(axis=(1, 2))
    np.testing.assert_allclose(gains, np.broadcast_to(each[:, None, None], gains.shape), rtol=1e-4)
    assert (each[:, 0] != each[:, 1]).sum() > DRAWS - 5
    assert abs(np.corrcoef(each.T)[0, 1]) < 5 / np.sqrt(DRAWS)


@both
def test_noise(draw: Draw) -> None:
    noise = draw(RandomNoise(0.3)) - PICTURE
    count = noise.size
    assert abs(noise.mean()) < 5 * 0.3 / np.sqrt(count)
    assert abs(noise.std() - 0.3) < 5 * 0.3 / np.sqrt(2 * count)
    assert 0.9 < np.abs(noise).max() < 0.3 * 12**0.5 + 1e-5
    # No two elements of two draws go together.
    assert abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.5


@both
def test_mask(draw: Draw) -> None:
    seen = draw(RandomMask(2, width=4, value=9.0))
    lengths, starts = set(), set()
    for each in seen:
        masked = np.isclose(each, 9.0, atol=1e-5).all(axis=(0, 2))
        np.testing.assert_allclose(each[:, ~masked], PICTURE[0][:, ~masked], atol=1e-6)
        places = np.flatnonzero(masked)
        assert places.size == 0 or places.size == places[-1] - places[0] + 1  # one stretch
        lengths.add(places.size)
        starts.update(places[:1].tolist())
    assert lengths == {0, 1, 2, 3, 4}
    assert len(starts) >= 5


@pytest.mark.parametrize(
    "transform",
    [
        RandomFlip(1),
        RandomShift(3),
        RandomShift(3, fill=7.0),
        RandomShift(3, fill="reflect"),
        RandomGain(0.25, 2.0, axis=1),
        RandomNoise(0.5),
        RandomMask(2, 3, count=2, value=9.0),
    ],
    ids=lambda each: each.kind,
)
def test_a_runtime_that_predicts_changes_nothing(transform: Transform) -> None:
    """Even where the graph is not made smaller for it."""
    np.testing.assert_array_equal(run(chain([RAW, transform]), PICTURE), PICTURE)


@pytest.mark.sampled(every=3)
def test_pytorch_draws_what_devices_draw() -> None:
    """Where it runs a device's step, its draws are the hash's."""
    transform = RandomMask(2, width=4, value=9.0)
    np.testing.assert_allclose(device(transform, "torch"), device(transform), atol=1e-6)


@pytest.mark.sampled(every=4)
def test_programs_that_predict_have_none_of_it(tmp_path: Path) -> None:
    changes = (RandomFlip(), RandomShift(2), RandomNoise(0.1), RandomGain(0.9, 1.1), RandomMask(1, 2))
    parts = [Raw("uint8", ("batch", 6, 7, 2)), *changes[:2], Scale(), *changes[2:]]
    with_changes, without = (put_before(linear(), each) for each in (parts, [parts[0], Scale()]))
    operators = [[node.op_type for node in deploy(model).predict.ir.graph] for model in (with_changes, without)]
    assert operators[0] == operators[1]
    training = Training(losses.mse(), optimizers.sgd(), batch_size=4)
    bundle = convert(with_changes, tmp_path / "bundle", signing=Signing(generate_key()), training=training)
    assert "features" not in bundle.manifest.programs
    assert {"seed", "step"} <= {port.name for port in bundle.manifest.programs["train"].inputs}
    # Off where dropout is.
    quiet = step_graph(with_changes, losses.mse(), optimizers.sgd(), dropout=False)
    assert "seed" not in {info.name for info in quiet.inputs}


def test_examples_of_a_private_step_draw_each_for_itself() -> None:
    """The step's weights are the mean of four equal examples, each of them turned or not."""
    model = put_before(linear(), [RAW, RandomFlip()])
    step = step_graph(model, losses.mse(), optimizers.sgd(lr=1.0), per_example=per_example(clip=1e6))
    runner = StepRunner(step, {"lr": 1.0}, 5)
    batch, label = np.repeat(PICTURE, 4, axis=0), np.full((4, 1), 0.5, np.float32)
    shares = set()
    for number in range(12):
        runner.resume({"kernel": np.zeros((84, 1), np.float32)}, number)
        runner.step((batch, label))
        mean = np.asarray(runner.tensors["kernel"]).reshape(PICTURE.shape[1:])
        turned = PICTURE[0, :, ::-1]
        share = float(((mean - PICTURE[0]) * (turned - PICTURE[0])).sum() / ((turned - PICTURE[0]) ** 2).sum())
        np.testing.assert_allclose(mean, PICTURE[0] + share * (turned - PICTURE[0]), atol=1e-5)
        shares.add(round(share * 4, 3))
    assert shares <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert len(shares) >= 3
