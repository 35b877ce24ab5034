"""Transforms of pictures and numbers against PyTorch, Pillow, and ONNX's own CenterCropPad."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx.reference.ops.op_center_crop_pad import CenterCropPad
from PIL import Image
from torch.nn import functional

from archipel.datasets import ArrayDataset
from archipel.errors import PreprocessingError
from archipel.preprocessing import (
    Clip,
    CropOrPad,
    Greyscale,
    Layout,
    Normalize,
    OneHot,
    Raw,
    Resize,
    ResizeShorter,
    Scale,
    Standardize,
    chain,
    fitted,
)
from tests.preprocessing.cases import FREE_PICTURES, PICTURES, SOUND, run

NCHW = torch.tensor(PICTURES).permute(0, 3, 1, 2)


@pytest.mark.parametrize("size", [(8, 5), (30, 40), (8, 40)])
@pytest.mark.parametrize(("mode", "antialias"), [("bilinear", False), ("bilinear", True), ("nearest", False)])
def test_resize_is_pytorch_s(size: tuple[int, int], mode: str, antialias: bool) -> None:
    answer = run(chain([FREE_PICTURES, Resize(size, mode, antialias)]), PICTURES)  # type: ignore[arg-type]
    name = "nearest-exact" if mode == "nearest" else mode
    wanted = functional.interpolate(NCHW.double(), size, mode=name, antialias=antialias).permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(answer, wanted, atol=1e-3)  # of 255
    turned = chain([Raw("uint8", ("batch", 3, "h", "w")), Resize(size, mode, antialias, "NCHW")])  # type: ignore[arg-type]
    np.testing.assert_array_equal(run(turned, NCHW.numpy()).transpose(0, 2, 3, 1), answer)


@pytest.mark.parametrize("turned", [False, True])
def test_the_shorter_side(turned: bool) -> None:
    """torchvision's Resize(8), then CenterCrop(8): of 13 x 17, so the longer side becomes 10."""
    pictures = PICTURES.transpose(0, 2, 1, 3) if turned else PICTURES
    planes = torch.tensor(pictures).permute(0, 3, 1, 2).double()
    size = (10, 8) if turned else (8, 10)
    wanted = functional.interpolate(planes, size, mode="bilinear", antialias=True).permute(0, 2, 3, 1).numpy()
    for raw in (FREE_PICTURES, Raw("uint8", ("batch", *pictures.shape[1:]))):
        program = chain([raw, ResizeShorter(8, antialias=True)])
        np.testing.assert_allclose(run(program, pictures), wanted, atol=1e-3)
        cropped = run(chain([raw, ResizeShorter(8, antialias=True), CropOrPad((8, 8))]), pictures)
        np.testing.assert_allclose(cropped, wanted[:, 1:9] if turned else wanted[:, :, 1:9], atol=1e-3)


@pytest.mark.parametrize("size", [(8, 5), (30, 40)])
def test_resize_with_antialias_is_pillow_s(size: tuple[int, int]) -> None:
    answer = run(chain([FREE_PICTURES, Resize(size, antialias=True)]), PICTURES)
    for picture, found in zip(PICTURES, answer):
        wanted = np.asarray(Image.fromarray(picture).resize(size[::-1], Image.Resampling.BILINEAR))
        assert np.abs(wanted - found).max() <= 1.0  # Pillow rounds to whole numbers, twice


def test_greyscale_is_pillow_s() -> None:
    answer = run(chain([FREE_PICTURES, Greyscale()]), PICTURES)[..., 0]
    for picture, found in zip(PICTURES, answer):
        assert np.abs(np.asarray(Image.fromarray(picture).convert("L")) - found).max() <= 0.51


@pytest.mark.parametrize("size", [(10, 20), (20, 10), (13, 17), (14, 18)])
def test_crop_or_pad_is_onnx_s(size: tuple[int, int]) -> None:
    answer = run(chain([FREE_PICTURES, CropOrPad(size)]), PICTURES)
    wanted = CenterCropPad.eval(PICTURES, np.array(size), axes=[1, 2])
    np.testing.assert_array_equal(answer, wanted)
    assert answer.dtype == np.uint8


def test_crop_or_pad_at_the_start() -> None:
    program = chain([Raw("int16", ("batch", "samples")), CropOrPad((4100,), (1,), at="start", value=-3)])
    np.testing.assert_array_equal(run(program, SOUND), np.pad(SOUND, [(0, 0), (0, 100)], constant_values=-3))
    np.testing.assert_array_equal(run(program, np.tile(SOUND, 2)), np.tile(SOUND, 2)[:, :4100])


def test_the_usual_chain_is_torchvision_s() -> None:
    """ToTensor, then Normalize with ImageNet's numbers, written with PyTorch."""
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    answer = run(chain([FREE_PICTURES, Scale(), Normalize(mean, std), Layout("NHWC", "NCHW")]), PICTURES)
    scaled = NCHW.float() / 255
    wanted = (scaled - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    np.testing.assert_allclose(answer, wanted.numpy(), atol=1e-6)


def test_standardize_is_layer_norm_s() -> None:
    answer = run(chain([Raw("int16", ("batch", 4000)), Standardize()]), SOUND)
    wanted = functional.layer_norm(torch.tensor(SOUND).double(), (4000,), eps=0).numpy()
    np.testing.assert_allclose(answer, wanted, atol=1e-5)
    silence = np.full((1, 4000), 77, np.int16)
    np.testing.assert_array_equal(run(chain([Raw("int16", ("batch", 4000)), Standardize()]), silence), 0 * silence)


def test_one_hot_and_clip() -> None:
    tokens = np.array([[0, 4, 2], [-1, 5, 1]])
    answer = run(chain([Raw("int64", ("batch", "tokens")), OneHot(5)]), tokens)
    np.testing.assert_array_equal(answer, (tokens[..., None] == np.arange(5)).astype(np.float32))
    clipped = run(chain([Raw("int16", ("batch", 4000)), Clip(-100, 50.5)]), SOUND)
    np.testing.assert_array_equal(clipped, np.clip(SOUND, -100, 50.5).astype(np.float32))


def test_fitted_measures_behind_the_transforms_before() -> None:
    parts = [FREE_PICTURES, Scale(), Normalize(), Layout("NHWC", "NCHW")]
    batches = [PICTURES[:1], PICTURES[1:]]
    named = ArrayDataset({"input": PICTURES, "label": np.arange(3)})
    scaled = PICTURES.astype(np.float64) / 255
    for data in (PICTURES, batches, named, {"anything": PICTURES}):
        measured = fitted(parts, data)[2]
        assert isinstance(measured, Normalize)
        np.testing.assert_allclose(measured.mean, scaled.mean(axis=(0, 1, 2)), rtol=1e-6)
        np.testing.assert_allclose(measured.std, scaled.std(axis=(0, 1, 2)), rtol=1e-6)
    assert fitted([Normalize()], np.full((4, 2), 3.0, np.float32))[0] == Normalize((3.0, 3.0), (1.0, 1.0))
    with pytest.raises(PreprocessingError, match="no data for the raw input 'input', only for 'a', 'b'"):
        fitted(parts, {"a": PICTURES, "b": PICTURES})
    with pytest.raises(PreprocessingError, match="not finite"):
        fitted([Normalize()], np.array([[1.0], [np.nan]], np.float32))
    with pytest.raises(PreprocessingError, match="no examples"):
        fitted([FREE_PICTURES, Normalize()], PICTURES[:0])
    with pytest.raises(PreprocessingError, match="no mean and std; give them, or let"):
        chain(parts)
