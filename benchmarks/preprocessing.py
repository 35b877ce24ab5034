"""What transforms in front of a model cost in ONNX Runtime, beside the libraries that apps use for the same.

One thread each, interleaved in one process: milliseconds a call. Sounds are 8 seconds of 16 kHz as one batch, pictures
one of 480 x 640; every row checks first that the peer's numbers are the same. PyTorch and Pillow are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from lite_models import quiet
from measure import Report, arguments, compare, interleave
from PIL import Image
from torch.nn import functional

from archipel import Model, preprocessing
from archipel.graph import Builder
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.preprocessing import Layout, LogMel, Normalize, Raw, Resize, Scale

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MEL = LogMel(points=512, window=400, hop=160, bands=40)


def session(model: Model) -> Callable[[np.ndarray], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    opened = onnxruntime.InferenceSession(model.to_bytes(), options, providers=["CPUExecutionProvider"])
    name = opened.get_inputs()[0].name
    return lambda x: opened.run(None, {name: x})[0]  # type: ignore[no-any-return]


def by_stft_operator() -> Model:
    """The log-mel spectrogram with ONNX's STFT in place of the Conv."""
    graph = ir.Graph([], [], nodes=[], name="stft", opset_imports={"": OPSET})
    op = Builder(graph)
    x = op.Div(op.Cast(op.input("input", ir.DataType.INT16, ["batch", 16000]), to=int(ir.DataType.FLOAT)), 32768.0)
    window = np.zeros(512, np.float32)
    window[56:456] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    spectrum = op.STFT(op.Unsqueeze(x, [2]), 160, window, 512, onesided=1)
    power = op.Transpose(op.ReduceSumSquare(spectrum, [-1], keepdims=0), perm=[0, 2, 1])
    bands = op.MatMul(MEL.filters().astype(np.float32), power)
    op.name_output(op.Log(op.Max(bands, 1e-6)), "output")
    return Model(ir.Model(graph, ir_version=IR_VERSION))


def sounds(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Callable[[np.ndarray], Any]]]:
    ours = session(preprocessing.chain([Raw("int16", ("batch", 16000)), Scale(32768), MEL]))
    filters, window = torch.tensor(MEL.filters(), dtype=torch.float32), torch.hann_window(400)

    def native(x: np.ndarray) -> np.ndarray:
        scaled = torch.from_numpy(x).float() / 32768
        spectrum = torch.stft(scaled, 512, 160, 400, window, center=False, return_complex=True)
        return torch.log(torch.clamp_min(filters @ spectrum.abs().square(), 1e-6)).numpy()  # type: ignore[no-any-return]

    peers = {"ours": ours, "ONNX STFT": session(by_stft_operator()), "torch.stft": native}
    return rng.integers(-9000, 9000, (8, 16000)).astype(np.int16), peers


def pictures(rng: np.random.Generator) -> tuple[np.ndarray, dict[str, Callable[[np.ndarray], Any]]]:
    raw = Raw("uint8", ("batch", 480, 640, 3))
    parts = [raw, Resize((224, 224), antialias=True), Scale(), Normalize(MEAN, STD), Layout("NHWC", "NCHW")]
    mean, std = np.array(MEAN, np.float32), np.array(STD, np.float32)

    def pillow(x: np.ndarray) -> np.ndarray:
        resized = np.asarray(Image.fromarray(x[0]).resize((224, 224), Image.Resampling.BILINEAR))
        return ((resized.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)[None]

    def native(x: np.ndarray) -> np.ndarray:
        planes = torch.from_numpy(x).permute(0, 3, 1, 2).float()
        resized = functional.interpolate(planes, (224, 224), mode="bilinear", antialias=True) / 255
        return ((resized - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]).numpy()  # type: ignore[no-any-return]

    peers = {"ours": session(preprocessing.chain(parts)), "Pillow, NumPy": pillow, "PyTorch": native}
    return rng.integers(0, 256, (1, 480, 640, 3), dtype=np.uint8), peers


def main() -> None:
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report(options.json, ("numpy", "onnxruntime", "torch", "pillow"))
    rng = np.random.default_rng(0)
    # Pillow rounds to bytes before and after the second axis, so its numbers are up to two of 255 apart.
    for case, make, apart in (("log-mel, 8 x 1 s", sounds, 1e-4), ("480 x 640 to 224", pictures, 2.5 / 255 / min(STD))):
        with quiet():
            x, peers = make(rng)
        wanted = peers["ours"](x)
        for name, run in peers.items():
            assert np.abs(run(x) - wanted).max() < apart, name
        times = interleave({name: partial(run, x) for name, run in peers.items()}, 1.0 if options.quick else 6.0)
        report.add(compare("preprocessing", case, "ours", times))


if __name__ == "__main__":
    main()
