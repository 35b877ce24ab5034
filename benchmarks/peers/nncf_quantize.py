"""NNCF's post-training quantization of an ONNX file, saved as OpenVINO IR, and what the result says of examples.

    python nncf_quantize.py MODEL.onnx CALIBRATION.npy INPUTS.npy OUT PRESET BIAS

PRESET is "performance" (symmetric activations) or "mixed" (asymmetric ones where they can be negative), BIAS "fast" or
"slow". Writes OUT.xml, OUT.bin and OUT.npy: the answer float32 [n, classes] to each row of INPUTS. Prints one JSON line
with versions.
"""

from __future__ import annotations

import json
import logging
import sys

import nncf
import numpy as np
import openvino as ov

BATCH = 250


def main(source: str, calibration: str, inputs: str, out: str, preset: str, bias: str) -> None:
    nncf.set_log_level(logging.ERROR)
    examples, asked = np.load(calibration), np.load(inputs, mmap_mode="r")
    data = nncf.Dataset([x[None] for x in examples])
    model = nncf.quantize(
        ov.Core().read_model(source),
        data,
        preset=nncf.QuantizationPreset(preset),
        fast_bias_correction=bias == "fast",
        subset_size=len(examples),
    )
    ov.save_model(model, f"{out}.xml", compress_to_fp16=False)
    # The saved file is what counts; bfloat16 would be the default where the processor has it.
    compiled = ov.compile_model(f"{out}.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    rows = [compiled(np.ascontiguousarray(asked[start : start + BATCH]))[0] for start in range(0, len(asked), BATCH)]
    np.save(f"{out}.npy", np.concatenate(rows).astype(np.float32))
    print(json.dumps({"nncf": nncf.__version__, "openvino": ov.__version__.split("-")[0]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
