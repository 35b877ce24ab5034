"""Runs nodes of the kernel pack, given as JSON lines on standard input, and prints what became of each.

"same", where the answers are PyTorch's in float64; "differs: HOW"; "no reference", where PyTorch refuses the shapes;
or "refused: TEXT", ONNX Runtime's error. Anything else ends the process, which is what the test looks for.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch.nn import functional

from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.lite_runtime.engines.kernels import KernelPack, kernel_pack
from archipel.lite_runtime.engines.onnx_runtime import error_types

WEIGHTS = "weights.safetensors"
OUTPUTS = {
    "BatchNorm": ["y", "mean", "variance"], "BatchNormGrad": ["dx", "dscale", "dbias"],
    "LSTM": ["y", "h", "c", "i", "o", "f", "g", "squashed", "before"], "LSTMGrad": ["gates", "dh", "dc", "dx"],
}  # fmt: skip
MOST = 1 << 22
"""Elements of an input, or of what PyTorch pads: more take time and show nothing else."""


def use(case: dict[str, Any], folder: Path, pack: KernelPack) -> str:
    """Run the node: `operator`, `attributes`, `shapes`, `threads`; with `misplaced` its inputs are in a file, there.

    `absent` and `float64` are indices of inputs; `put`, an index and a number, of one with that number in the middle.
    """
    rng = np.random.default_rng(0)
    if any(math.prod(shape) > MOST for shape in case["shapes"]):
        return "refused: more elements than this test makes"
    try:
        arrays = [rng.standard_normal(shape, np.float32) for shape in case["shapes"]]
        prepare(case, arrays)
        path = write(case, arrays, folder)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = case["threads"]
        pack.register(options, case["threads"])
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {} if "misplaced" in case else {f"i{n}": a for n, a in enumerate(arrays) if n != case.get("absent")}
        found = session.run(None, feed)
    except (*error_types(), OSError) as error:
        return f"refused: {' '.join(str(error).split())}"
    try:
        expected = reference(case, arrays)
    except (RuntimeError, KeyError, IndexError, ValueError) as error:
        return f"no reference: {' '.join(str(error).split())}"
    for have, want in zip(found, expected, strict=True):
        if have.shape != want.shape:
            return f"differs: shape {have.shape}, not {want.shape}"
        most = np.abs(want[np.isfinite(want)]).max(initial=1)
        if not np.allclose(have, want, rtol=0, atol=1e-5 * most, equal_nan=True):
            return f"differs: by {np.abs(have - want).max()}"
    return "same"


def prepare(case: dict[str, Any], arrays: list[np.ndarray]) -> None:
    """Values in the operator's range, and those that the case names."""
    if case["operator"] == "BatchNormGrad":
        arrays[3] = np.abs(arrays[3])  # the variance
    if case["operator"] in ("LSTM", "LSTMGrad"):
        for n in (1, 2) if case["operator"] == "LSTM" else (6, 7):
            arrays[n] /= np.sqrt(np.float32(max(1, *arrays[n].shape[-1:])))  # the weights
    if case["operator"] == "LSTMGrad":
        arrays[:5] = [1 / (1 + np.exp(-a)) if n < 3 else np.tanh(a) for n, a in enumerate(arrays[:5])]
    if "put" in case and arrays[case["put"][0]].size:
        array = arrays[case["put"][0]]
        array.flat[array.size // 2] = float(case["put"][1])
    if "float64" in case:
        arrays[case["float64"]] = arrays[case["float64"]].astype(np.float64)


def write(case: dict[str, Any], arrays: list[np.ndarray], folder: Path) -> Path:
    names = [f"i{n}" for n in range(len(arrays))]
    outputs = OUTPUTS.get(case["operator"], ["y"])
    given_names = ["" if n == case.get("absent") else name for n, name in enumerate(names)]
    node = onnx.helper.make_node(case["operator"], given_names, outputs, domain=KERNELS_DOMAIN)
    for name, value in case["attributes"].items():
        kind = onnx.AttributeProto.INTS if value == [] else None
        node.attribute.append(onnx.helper.make_attribute(name, value, attr_type=kind))
    kinds = {array.dtype: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays}
    given = [onnx.helper.make_tensor_value_info(n, kinds[a.dtype], a.shape) for n, a in zip(given_names, arrays) if n]
    made = [onnx.helper.make_tensor_value_info(name, 1, None) for name in outputs]
    graph = onnx.helper.make_graph([node], "case", given, made)
    if "misplaced" in case:
        del graph.input[:]
        data = bytes(case["misplaced"])
        for name, array in zip(names, arrays):
            tensor = graph.initializer.add(name=name, dims=array.shape, data_type=1, data_location=1)
            for key, value in {"location": WEIGHTS, "offset": len(data), "length": array.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            data += array.tobytes()
        (folder / WEIGHTS).write_bytes(data)
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid(KERNELS_DOMAIN, 1)]
    path = folder / "case.onnx"
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString())
    return path


def reference(case: dict[str, Any], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """What the operators' functions say, by PyTorch in float64. Raises its errors, KeyError for absent attributes."""
    operator, attributes = case["operator"], case["attributes"]
    tensors = [torch.from_numpy(array.astype(np.float64)) for array in arrays]
    if operator in ("ReluGrad", "ClipGrad"):
        passes = tensors[1] != (tensors[2] if operator == "ClipGrad" else 0)
        return [torch.where(passes ^ (operator == "ClipGrad"), tensors[0], 0).numpy()]
    if operator == "BatchNorm":
        x, scale, bias = tensors
        axes = [0, *range(2, x.ndim)]
        y = functional.batch_norm(x, None, None, scale, bias, True, eps=attributes["epsilon"])
        return [each.numpy() for each in (y, x.mean(axes), x.var(axes, correction=0))]
    if operator == "BatchNormGrad":
        x, g, mean, variance, scale = tensors
        axes, row = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        inverse = (variance + attributes["epsilon"]).rsqrt()
        away = (x - mean.view(row)) * inverse.view(row)
        slope, shift = (g * away).mean(axes), g.mean(axes)
        dx = (scale * inverse).view(row) * (g - shift.view(row) - away * slope.view(row))
        return [each.numpy() for each in (dx, slope, shift)]
    if operator in ("LSTM", "LSTMGrad"):
        absent = case.get("absent")
        given = [None if n == absent else tensor for n, tensor in enumerate(tensors)]
        steps = range(tensors[0].shape[0])
        if len(steps) > MOST:
            raise ValueError("too many steps")
        order = steps[::-1] if attributes["reverse"] else steps
        return [each.detach().numpy() for each in (lstm if operator == "LSTM" else lstm_gradient)(order, *given)]
    group = attributes["group"]
    if operator == "ConvGradInput":
        x, w = torch.zeros(tensors[0].shape[0], tensors[1].shape[1] * group, *attributes["input_size"]), tensors[1]
    elif operator == "ConvGradWeight":
        x, w = tensors[0], torch.zeros(tensors[1].shape[1], tensors[0].shape[1] // group, *attributes["kernel_shape"])
    else:
        x, w = tensors[:2]
    top, left, bottom, right = attributes["pads"]
    if x[:, :, 0, 0].numel() * (x.shape[2] + top + bottom) * (x.shape[3] + left + right) > MOST:
        raise ValueError("too many elements")
    x, w = x.double().requires_grad_(), w.double().requires_grad_()
    padded = functional.pad(x, [left, right, top, bottom])
    bias = tensors[2] if len(tensors) > 2 else None
    y = functional.conv2d(padded, w, bias, attributes["strides"], 0, attributes["dilations"], group)
    if operator == "Conv":
        return [y.detach().numpy()]
    of, cotangent = (x, tensors[0]) if operator == "ConvGradInput" else (w, tensors[1])
    return [torch.autograd.grad(y, of, cotangent)[0].numpy()]


def lstm(order: range, x: Any, w: Any, r: Any, h: Any, c: Any) -> list[torch.Tensor]:
    """h after each step, the last h and c, and i, o, f, g, tanh(c) and c before each step."""
    kept = torch.zeros(7, len(order), *h.shape, dtype=torch.float64)
    for step in order:
        i, o, f, g = (w @ x[step] + r @ h).chunk(4)
        i, o, f, g, before = i.sigmoid(), o.sigmoid(), f.sigmoid(), g.tanh(), c
        c = f * before + i * g
        h = o * c.tanh()
        kept[:, step] = torch.stack([h, i, o, f, g, c.tanh(), before])
    return [kept[0], h, c, *kept[1:]]


def lstm_gradient(order: range, *given: Any) -> list[torch.Tensor]:
    """The gradients, at 0, of what is added to the gates' arguments, to h and c before the first step, and to x."""
    i, o, f, g, squashed, before, r, w, dh, dc, *dy = given
    steps, hidden, batch = i.shape
    sizes = [(steps, 4 * hidden, batch), (hidden, batch), (hidden, batch), (steps, w.shape[1], batch)]
    a, h, c, x = leaves = [torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    kept = torch.cat([i.logit(), o.logit(), f.logit(), g.atanh()], 1)
    total = 0.0
    for step in order:
        to_i, to_o, to_f, to_g = (kept[step] + a[step] + r @ h + w @ x[step]).chunk(4)
        after = to_f.sigmoid() * (before[step] + c) + to_i.sigmoid() * to_g.tanh()
        c = after - after.detach()
        state = to_o.sigmoid() * (squashed[step].atanh() + c).tanh()
        h = state - state.detach()
        if dy and dy[0] is not None:
            total = total + (h * dy[0][step]).sum()
    total = total + (h * dh).sum() + (c * dc).sum()
    return list(torch.autograd.grad(total, leaves, materialize_grads=True))


def main() -> None:
    torch.set_num_threads(1)
    pack = kernel_pack()
    assert pack.library is not None, pack
    print("ready", flush=True)
    for line in sys.stdin:
        print(use(json.loads(line), Path(sys.argv[1]), pack), flush=True)


main()
