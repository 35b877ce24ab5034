"""How little a training step of standard operators can take on ONNX Runtime: each of its operators alone.

The graph is the step as ONNX Runtime's optimizer leaves it. Every node gets a session of its own, with the values that
it has in the step, and the least processor time of several runs, one thread, batch 32; a loop runs as a whole.
"products" are those of convolutions, of products of matrices, and of the loops' products, each alone as well: what is
left if everything else were free. "all" is the sum over all nodes: they find their inputs in the caches here, and each
pays for a run of its own, which counts in small networks. "step" is the whole step, "PyTorch" a step of eager PyTorch
in the faster memory layout, the least of several as well.

    python benchmarks/step_floor.py --only LSTM
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from measure import Row, arguments, keep_memory, least_work, state_run
from step_cases import CASES, data, keep, kept_step, ours, step_file
from step_classes import BATCH, torch_time

PRODUCTS = ("Conv", "FusedConv", "ConvTranspose", "Gemm", "FusedGemm", "MatMul", "FusedMatMul")
Values = dict[str, np.ndarray]


def session_of(graph: onnx.GraphProto, like: onnx.ModelProto) -> ort.InferenceSession:
    """A session that runs the graph as it is, on one thread."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = onnx.helper.make_model(graph, opset_imports=like.opset_import, ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def optimized(path: Path, folder: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 4, str(folder / "optimized.onnx")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimized.onnx")


def read_by(node: onnx.NodeProto) -> list[str]:
    """The values that a node reads, those that its bodies read of the graph outside included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            body = attribute.g
            inside = {value.name for value in [*body.input, *body.initializer]}
            inside |= {name for each in body.node for name in each.output}
            names += [name for each in body.node for name in read_by(each) if name not in inside]
    return list(dict.fromkeys(names))


def feed_of(step: Any, x: np.ndarray, y: np.ndarray) -> Values:
    from archipel.training.driver import _initial, _scalars

    tensors, scalars = _initial(step.program, step), _scalars(step.program, {"lr": 1e-4})
    feed: Values = {}
    free = iter((x, y))
    for port in step.signature.inputs:
        tensor = getattr(port, "tensor", None)
        feed[port.name] = np.array(
            tensors[tensor] if tensor in tensors else scalars[port.name] if port.name in scalars else next(free)
        )
    return feed


def every_value(model: onnx.ModelProto, feed: Mapping[str, np.ndarray]) -> Values:
    """What each name of the graph stands for in a step."""
    made = [name for node in model.graph.node for name in node.output if name]
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    session = session_of(graph, model)
    needed = {each.name for each in session.get_inputs()}
    found = dict(zip(made, session.run(made, {name: each for name, each in feed.items() if name in needed})))
    return {**found, **feed, **{each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}}


def alone(node: onnx.NodeProto, model: onnx.ModelProto, values: Values) -> float:
    """Milliseconds of this node by itself."""
    constants = {each.name: each for each in model.graph.initializer}
    names, results = read_by(node), [name for name in node.output if name]

    def info(name: str) -> onnx.ValueInfoProto:
        kind = onnx.helper.np_dtype_to_tensor_dtype(values[name].dtype)
        return onnx.helper.make_tensor_value_info(name, kind, values[name].shape)

    given = [name for name in names if name not in constants]
    graph = onnx.helper.make_graph(
        [node],
        "alone",
        list(map(info, given)),
        list(map(info, results)),
        [constants[n] for n in names if n in constants],
    )
    session = session_of(graph, model)
    binding = session.io_binding()
    for name in given:
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.array(values[name])))
    for name in results:
        binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(np.array(values[name])))
    once = least_work(lambda: session.run_with_iobinding(binding), 2)
    return min(once, least_work(lambda: session.run_with_iobinding(binding), 15 if once < 20 else 4))


def products_of(node: onnx.NodeProto, model: onnx.ModelProto, values: Values) -> float:
    """Milliseconds of a Scan's products by themselves, all its iterations."""
    [body] = [attribute.g for attribute in node.attribute if attribute.name == "body"]
    [sequences] = [attribute.i for attribute in node.attribute if attribute.name == "num_scan_inputs"]
    carried = len(body.input) - sequences
    inside = {own.name: values[name] for own, name in zip(body.input[:carried], node.input)}
    inside |= {own.name: values[name][0] for own, name in zip(body.input[carried:], node.input[carried:])}
    outer = {name: values[name] for each in body.node for name in read_by(each) if name in values}
    graph = onnx.GraphProto()
    graph.CopyFrom(body)
    local = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    for name, each in outer.items():
        kind = onnx.helper.np_dtype_to_tensor_dtype(each.dtype)
        local.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, each.shape))
    found = every_value(local, {**inside, **outer})
    length = len(values[node.input[carried]])
    return length * sum(alone(each, local, found) for each in body.node if each.op_type in PRODUCTS)


def measure(name: str, folder: Path) -> dict[str, float]:
    case = CASES[name]
    path = folder / "step.onnx"
    keep(step_file(case, path), path)
    step, (x, y) = kept_step(path), data(case, BATCH)
    model = optimized(path, folder)
    values = every_value(model, feed_of(step, x, y))
    products = total = 0.0
    for node in model.graph.node:
        spent = alone(node, model, values)
        total += spent
        if node.op_type in PRODUCTS:
            products += spent
        elif node.op_type == "Scan":
            products += products_of(node, model, values)
    run, _ = ours(step, path, x, y, threads=1)
    return {"products": products, "all": total, "step": least_work(run, 15), "PyTorch": torch_time(case, 15)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this model; can be repeated")
    options = parser.parse_args()
    keep_memory()  # PyTorch is faster so
    state_run(options.json, ("numpy", "onnxruntime", "torch"))
    for name in options.only or (("MLP", "LeNet") if options.quick else CASES):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(name, Path(folder))
        theirs = found["PyTorch"]
        if options.json:
            for kind in ("products", "all", "step"):
                title = f"{name} batch {BATCH}: {kind}"
                row = Row("step floor", title, found[kind], theirs, "eager PyTorch", found[kind] / theirs, "ms")
                print(json.dumps(asdict(row)), flush=True)
        else:
            cells = "".join(f"  {kind} {spent:.2f}" for kind, spent in found.items())
            ratios = "".join(f"  {kind}/PyTorch {found[kind] / theirs:.2f}" for kind in ("products", "step"))
            print(f"{name:<12}{cells}{ratios}", flush=True)


if __name__ == "__main__":
    main()
