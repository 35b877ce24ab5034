"""What a training step spends its time on, by class of operator: standard operators, and with the kernel pack.

"input grad" and "weight grad" are those of convolutions that are not depthwise; "depthwise" is forward and both
gradients; "layout" are changes between ONNX Runtime's layouts; "dense" also has what its optimizer has joined with
them, such as an addition to a 1 x 1 convolution's weight gradient.

One thread, so that the classes add up to the step; milliseconds at batch 32 from ONNX Runtime's own trace, of each node
the fastest of the runs, since other work on the machine only adds to it. The last column is a step of eager PyTorch in
the faster memory layout with the fused optimizer, its processor time, of which this takes the fastest, too.

    python benchmarks/step_classes.py --only MobileNetV2
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from measure import Row, arguments, keep_memory, least_work, print_alone, state_run
from step_cases import CASES, Case, data, keep, kept_step, network, ours, step_file, torch_step, ways

CONVOLUTIONAL = ("LeNet", "FedAvg CNN", "ResNet-8", "DS-CNN", "MobileNetV2", "1D-CNN")
CLASSES = (
    "convolution", "input grad", "weight grad", "depthwise", "layout", "pooling", "normalized", "dense", "optimizer",
    "rest",
)  # fmt: skip
BATCH = 32


def class_of(name: str, op: str, depthwise: set[str]) -> str:
    """The class of a node, by its operator and name, which begins with that of the model's node."""
    if op.startswith("Reorder"):
        return "layout"
    layer, _, part = name.partition(".vjp/")
    part = part.split("/")[0]
    if op.startswith(("Conv", "FusedConv")) or part in ("forward", "input", "weight"):
        if layer.split("/")[0].removesuffix("_nchwc") in depthwise:
            return "depthwise"
        return {"input": "input grad", "weight": "weight grad"}.get(part, "convolution")
    if "pool" in name.lower() or "Pool" in op:
        return "pooling"
    if "norm" in name.lower():
        return "normalized"
    if ".update/" in name:
        return "optimizer"
    return "dense" if op in ("Gemm", "FusedGemm", "MatMul", "FusedMatMul") else "rest"


def traced(session: Any, run: Callable[[], None], steps: int, depthwise: set[str]) -> Counter[str]:
    """Milliseconds of a step by class."""
    for _ in range(steps):
        run()
    fastest: dict[str, tuple[float, str]] = {}
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name, op = event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]
            fastest[name] = min(fastest.get(name, (float("inf"), op)), (event["dur"], op))
    spent: Counter[str] = Counter()
    for name, (microseconds, op) in fastest.items():
        spent[class_of(name, op, depthwise)] += microseconds / 1e3
    return spent


def torch_time(case: Case, steps: int) -> float:
    """Milliseconds of processor time of a step of eager PyTorch."""
    x, y = data(case, BATCH)
    layouts = {way.channels_last: way for way in reversed(ways(x))}
    return min(least_work(torch_step(case, x, y, False, way, threads=1), steps) for way in layouts.values())


def main() -> None:
    from archipel import Model
    from archipel.lite_runtime.engines.kernels import kernel_pack

    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this model; can be repeated")
    options = parser.parse_args()
    keep_memory()  # PyTorch is faster so
    state_run(options.json, ("numpy", "onnxruntime", "torch"))
    if not options.json:
        print(f"{'':<26}" + "".join(f"{kind:>13}" for kind in CLASSES) + f"{'sum':>9}{'PyTorch':>9}")
    steps = 8 if options.quick else 25
    for name in options.only or (CONVOLUTIONAL[:1] if options.quick else CONVOLUTIONAL):
        case = CASES[name]
        model = Model.from_torch(network(case), data(case, 2)[0])
        groups = {node.name: node.attributes.get_int("group", 1) for node in model.ir.graph if node.op_type == "Conv"}
        depthwise = {str(layer) for layer, group in groups.items() if group > 1}
        theirs = torch_time(case, steps)
        for kernels in (False, True) if kernel_pack().library is not None else (False,):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "step.onnx"
                keep(step_file(case, path, kernels), path)
                step = kept_step(path)
                run, session = ours(step, path, *data(case, BATCH), threads=1, kernels=kernels, profile=True)
                spent = traced(session, run, steps, depthwise)
            title = name + ", kernel pack" * kernels
            if options.json:
                for kind, milliseconds in spent.items():
                    print_alone("step classes", f"{title}: {kind}", ms=milliseconds)
                whole = sum(spent.values())
                row = Row("step classes", f"{title}: sum", whole, theirs, "eager PyTorch", whole / theirs, "ms")
                print(json.dumps(asdict(row)), flush=True)
            else:
                cells = "".join(f"{spent[kind]:>13.2f}" for kind in CLASSES)
                print(f"{title:<26}{cells}{sum(spent.values()):>9.2f}{theirs:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
