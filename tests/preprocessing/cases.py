"""A case for every kind of transform: what is raw, the transform, and examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from archipel.graph import Model
from archipel.preprocessing import (
    Average,
    Cast,
    Clip,
    CropOrPad,
    Frames,
    Greyscale,
    Layout,
    LogMel,
    Mfcc,
    Normalize,
    OneHot,
    Preemphasis,
    RandomFlip,
    RandomGain,
    RandomMask,
    RandomNoise,
    RandomShift,
    Raw,
    Resize,
    ResizeShorter,
    Scale,
    Spectrogram,
    Standardize,
    Transform,
)

_RNG = np.random.default_rng(0)
PICTURES = _RNG.integers(0, 256, (3, 13, 17, 3), dtype=np.uint8)
SOUND = (
    6000 * np.sin(2 * np.pi * 440 * np.arange(4000) / 16000) + _RNG.normal(0, 2000, (3, 4000))
).astype(np.int16)  # fmt: skip
FREE_PICTURES = Raw("uint8", ("batch", "height", "width", 3))
FREE_SOUND = Raw("int16", ("batch", "samples"))
WINDOWS = {"points": 256, "window": 200, "hop": 80}


@dataclass(frozen=True)
class Case:
    """`raw` has symbolic sizes; `examples` are of one choice of them."""

    raw: Raw
    transforms: tuple[Transform, ...]
    examples: np.ndarray


CASES = {
    "cast": Case(FREE_PICTURES, (Cast("int64"),), PICTURES),
    "scale": Case(FREE_PICTURES, (Scale(127.5, -1.0),), PICTURES),
    "normalize": Case(FREE_PICTURES, (Normalize((120.0, 110.0, 100.0), (60.0, 50.0, 70.0)),), PICTURES),
    "normalize, one number": Case(FREE_SOUND, (Normalize((10.0,), (3000.0,)),), SOUND),
    "clip": Case(FREE_SOUND, (Clip(-1000, 2000.5),), SOUND),
    "standardize": Case(FREE_SOUND, (Standardize(),), SOUND),
    "standardize, axes": Case(FREE_PICTURES, (Standardize((1, 2)),), PICTURES),
    "one_hot": Case(Raw("int32", ("batch", "tokens")), (OneHot(5),), np.array([[0, 4, 2], [-1, 5, 1]], np.int32)),
    "layout": Case(FREE_PICTURES, (Layout("NHWC", "NCHW"),), PICTURES),
    "layout, new axis": Case(FREE_SOUND, (Layout("NS", "N1S"),), SOUND),
    "resize": Case(FREE_PICTURES, (Resize((8, 21)),), PICTURES),
    "resize, antialias": Case(FREE_PICTURES, (Resize((8, 5), antialias=True),), PICTURES),
    "resize, nearest": Case(FREE_PICTURES, (Resize((20, 9), mode="nearest"),), PICTURES),
    "resize_shorter": Case(FREE_PICTURES, (ResizeShorter(8, antialias=True),), PICTURES),
    "average": Case(FREE_PICTURES, (Average(),), PICTURES),
    "preemphasis": Case(FREE_SOUND, (Preemphasis(),), SOUND),
    "crop_or_pad": Case(FREE_PICTURES, (CropOrPad((10, 20), value=7),), PICTURES),
    "crop_or_pad, start": Case(FREE_SOUND, (CropOrPad((5000,), (1,), at="start"),), SOUND),
    "greyscale": Case(FREE_PICTURES, (Greyscale(),), PICTURES),
    "frames": Case(FREE_SOUND, (Frames(300, 70),), SOUND),
    "spectrogram": Case(FREE_SOUND, (Scale(32768), Spectrogram(**WINDOWS, power=1)), SOUND),
    "log_mel": Case(FREE_SOUND, (Scale(32768), LogMel(**WINDOWS, bands=20)), SOUND),
    "log_mel, centred": Case(FREE_SOUND, (Scale(32768), LogMel(**WINDOWS, bands=20, center=True, log="db")), SOUND),
    "random_flip": Case(FREE_PICTURES, (RandomFlip(),), PICTURES),
    "random_shift": Case(FREE_PICTURES, (RandomShift(3),), PICTURES),
    "random_gain": Case(FREE_SOUND, (RandomGain(0.5, 1.5),), SOUND),
    "random_noise": Case(FREE_PICTURES, (RandomNoise(10.0),), PICTURES),
    "random_mask": Case(FREE_PICTURES, (RandomMask(2, 9, count=2, value=128),), PICTURES),
    "mfcc": Case(FREE_SOUND, (Scale(32768), Mfcc(**WINDOWS, bands=20, scale="slaney", norm="area")), SOUND),
}  # fmt: skip


def run(model: Model, *examples: np.ndarray) -> np.ndarray:
    """The first output of the model in ONNX Runtime."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {info.name: array for info, array in zip(model.inputs, examples, strict=True)}
    return np.asarray(session.run(None, feed)[0])
