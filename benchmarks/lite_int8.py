"""Why an int8 network takes the time that it takes: other ways to quantize and to run it, and profiles by operator.

    python benchmarks/lite_int8.py --only MLP --only DS-CNN         ways, in microseconds a prediction
    python benchmarks/lite_int8.py --only MLP --profile             operators, of ours, OpenVINO and LiteRT

Batch 1. Ways differ from the converter's recipe (unsigned activations, signed weights per channel, QDQ) in what their
name says; "global pool" has GlobalAveragePool instead of ReduceMean, "float output" ends without QuantizeLinear.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from lite_models import CASES, Files, quiet
from lite_peers import DEFAULT_FOLDER, HERE, Peer, PeerError, clean_environment, python_of
from lite_predict import apart, in_process, raw_run, raw_session, say, timed
from measure import Row, arguments, print_alone, state_run

RECIPE = "the recipe"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="only this network; can be repeated")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="rounds of a comparison (default 15)")
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the peers' environments")
    parser.add_argument("--profile", action="store_true", help="operators instead of ways")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 15)
    state_run(options.json)
    with tempfile.TemporaryDirectory(prefix="archipel-int8-") as folder:
        for name in options.only or (["MLP"] if options.quick else CASES):
            files = Files(name, Path(folder), options.peers / "models")
            if options.profile:
                show_profiles(files, options.threads, options.peers, Path(folder))
            else:
                show_ways(files, options.threads, rounds, Path(folder), options.json)


# --- ways -------------------------------------------------------------------------------------------------------------


def ways(files: Files, folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Name, graph and session settings of every way; the first two are float and the recipe."""
    from onnxruntime import GraphOptimizationLevel
    from onnxruntime.quantization import QuantFormat, QuantType

    float_path = folded(files, folder / f"{files.case.make}.onnx")
    layers = [name for name, kind in nodes(float_path) if kind in ("Conv", "Gemm")]
    pooled = rewritten(float_path, folder / "pooled.onnx", use_global_pool)

    def quantized(name: str, source: Path = float_path, float_output: bool = False, **options: Any) -> Path:
        path = folder / f"{files.case.make} {name}.onnx"
        quantize(source, path, np.load(files.calibration), **options)
        return rewritten(path, path, end_in_float) if float_output else path

    recipe = quantized(RECIPE)
    best = quantized("global pool, float output", pooled, float_output=True)
    yield "float", float_path, {}
    yield RECIPE, recipe, {}
    yield "signed activations", quantized("signed", activation_type=QuantType.QInt8), {}
    yield "unsigned weights", quantized("unsigned", weight_type=QuantType.QUInt8), {}
    yield "weights per tensor", quantized("tensor", per_channel=False), {}
    yield "QLinear operators, no QDQ", quantized("operators", quant_format=QuantFormat.QOperator), {}
    yield "global pool", quantized("pool", pooled), {}
    yield "float output", quantized("output", float_output=True), {}
    yield "global pool, float output", best, {}
    first = quantized("first", pooled, float_output=True, nodes_to_exclude=layers[:1])
    yield "the same, first layer in float", first, {}
    tensor = quantized("both", pooled, float_output=True, per_channel=False)
    yield "the same, weights per tensor", tensor, {}
    yield "fixed batch", rewritten(recipe, folder / "fixed.onnx", fix_batch), {}
    yield "no layout change (NCHW)", recipe, {"graph_optimization_level": GraphOptimizationLevel.ORT_ENABLE_EXTENDED}
    yield "no memory pattern", recipe, {"enable_mem_pattern": False}


def show_ways(files: Files, threads: int, rounds: int, folder: Path, as_json: bool) -> None:
    inputs = np.load(files.inputs)
    with quiet():
        runners = [
            in_process(name, raw_run(raw_session(path, threads, **settings)), inputs)
            for name, path, settings in ways(files, folder)
        ]
    times = timed(runners, rounds, 0.01)
    truth = runners[0].outputs()
    if not as_json:
        print(f"{files.name}, {threads} threads{'us':>22}{'to recipe':>11}{'off float':>11}")
    for runner in runners:
        ratio = statistics.median(a / b for a, b in zip(times[runner.name], times[RECIPE]))
        median, off = statistics.median(times[runner.name]), apart(runner.outputs(), truth)
        if as_json:
            recipe = statistics.median(times[RECIPE])
            case = f"{files.name}, {threads} threads, {runner.name}"
            print(json.dumps(asdict(Row("lite_int8", case, median, recipe, RECIPE, ratio, "us"))), flush=True)
            print_alone("lite_int8", case, distance_from_float_over_its_norm=off)
        else:
            print(f"  {runner.name:<31}{median:>8.1f}{ratio:>11.2f}{off:>11.3f}", flush=True)


def folded(files: Files, path: Path) -> Path:
    """The float graph with BatchNormalization in the layers before, as the converter quantizes it."""
    from archipel import Model
    from archipel.graph.functions import inline_functions
    from archipel.training.batch_norm import prepared

    model = prepared(Model.from_torch(files.network().eval(), files.data(2)[0]), "folded")
    inline_functions(model.ir)
    model.save(path)
    return path


def quantize(source: Path, target: Path, calibration: np.ndarray, **options: Any) -> None:
    from onnxruntime import quantization as ortq

    class Reader(ortq.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = iter(np.split(calibration, 4))

        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(self._batches, None)
            return None if batch is None else {"input": batch}

    given = {"per_channel": True, "activation_type": ortq.QuantType.QUInt8, "weight_type": ortq.QuantType.QInt8}
    ortq.quantize_static(source, target, Reader(), **{**given, **options})


def nodes(path: Path) -> list[tuple[str, str]]:
    import onnx

    return [(node.name, node.op_type) for node in onnx.load(path).graph.node]


def rewritten(source: Path, target: Path, change: Any) -> Path:
    import onnx

    model = onnx.load(source)
    change(model.graph)
    onnx.save(model, target)
    return target


def use_global_pool(graph: Any) -> None:
    axes = {node.input[1] for node in graph.node if node.op_type == "ReduceMean"}
    for node in graph.node:
        if node.op_type == "ReduceMean":
            node.op_type = "GlobalAveragePool"
            del node.input[1:], node.attribute[:]
    for tensor in [each for each in graph.initializer if each.name in axes]:
        graph.initializer.remove(tensor)


def end_in_float(graph: Any) -> None:
    """Take the last QuantizeLinear and DequantizeLinear away: the last layer gives what it has in float."""
    name = graph.output[0].name
    made_by = {output: node for node in graph.node for output in node.output}
    last = made_by[name]
    if last.op_type != "DequantizeLinear":
        return
    before = made_by[last.input[0]]
    layer = made_by[before.input[0]]
    layer.output[0] = name
    graph.node.remove(last)
    graph.node.remove(before)


def fix_batch(graph: Any) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "batch":
                dim.dim_value = 1


# --- profiles ---------------------------------------------------------------------------------------------------------


def show_profiles(files: Files, threads: int, peers: Path, folder: Path) -> None:
    for kind, bundle in (("float", files.bundle), ("int8", files.int8)):
        show(f"{files.name} {kind}, ours", our_profile(bundle / "predict.onnx", files, threads, folder))
    try:
        peer = Peer("openvino", peers, folder / "openvino.log")
        peer.load("int8 profile", files, threads)
        rows = [(name, time) for name, time in peer.ask(do="profile", kind="int8 profile")["rows"]]
        peer.close()
        show(f"{files.name} int8, OpenVINO", rows)
        for kind, rows in litert_profiles(files, threads, peers, folder).items():
            show(f"{files.name} {kind}, LiteRT, by prefixes of the network", rows)
    except PeerError as error:
        say(f"{files.name}: {error}")


def show(title: str, rows: list[tuple[str, float]]) -> None:
    print(f"{title}: {sum(time for _, time in rows):.1f} us")
    for name, time in rows:
        print(f"    {time:7.1f}  {name}")


def our_profile(path: Path, files: Files, threads: int, folder: Path, calls: int = 300) -> list[tuple[str, float]]:
    """Microseconds by node from ONNX Runtime's trace, whose own cost a node (some microseconds) is taken off.

    What a prediction takes without the trace says how much that is: it is spread evenly over the nodes.
    """
    x = files.data(1)[0]
    plain = in_process("plain", raw_run(raw_session(path, threads)), x)
    session = raw_session(path, threads, enable_profiling=True, profile_file_prefix=str(folder / "trace"))
    predict = raw_run(session)
    for _ in range(calls):
        predict(x)
    spent: dict[str, list[float]] = {}
    for event in json.loads(Path(session.end_profiling()).read_text()):
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            spent.setdefault(f"{event['args']['op_name']} {event['name'].removesuffix('_kernel_time')}", []).append(
                event["dur"]
            )
    rows = [(name, statistics.fmean(sorted(times)[: calls * 4 // 5])) for name, times in spent.items()]
    total = min(plain.seconds(300) for _ in range(5)) * 1e6
    outside = fixed_cost(files, threads, folder)
    extra = max(0.0, sum(time for _, time in rows) + outside - total) / len(rows)
    return [*((name, max(0.0, time - extra)) for name, time in rows), ("outside the operators", outside)]


def fixed_cost(files: Files, threads: int, folder: Path) -> float:
    """Microseconds that a call takes for a graph whose only operator hands its input on."""
    import onnx
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, *files.case.shape]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "fixed", ports[:1], ports[1:])
    graph.initializer.append(
        helper.make_tensor("shape", TensorProto.INT64, [1 + len(files.case.shape)], [1, *files.case.shape])
    )
    path = folder / "fixed-cost.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    runner = in_process("fixed", raw_run(raw_session(path, threads)), files.data(1)[0])
    return min(runner.seconds(300) for _ in range(5)) * 1e6


def litert_profiles(files: Files, threads: int, peers: Path, folder: Path) -> dict[str, list[tuple[str, float]]]:
    """LiteRT tells nothing of what its delegate does, so: the time that each layer adds to the network before it."""
    place = folder / f"prefixes-{files.case.make}"
    place.mkdir()
    script = HERE / "convert_litert.py"
    command = [python_of(peers, "litert-convert"), script, "--prefixes", files.onnx, files.calibration, place]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=False)
    if done.returncode:
        raise PeerError(f"conversion of prefixes failed: {done.stderr[-300:]}")
    peer = Peer("litert", peers, folder / "litert.log")
    names = json.loads((place / "names.json").read_text())
    found = {}
    for kind in ("float", "int8"):
        for index in range(len(names)):
            peer.load(f"{kind}-{index}", files, threads, folder=place)
        # The least of several medians, in turns, as only differences count.
        times = [[peer.seconds(f"{kind}-{index}", 500) for index in range(len(names))] for _ in range(7)]
        found[kind] = list(zip(names, np.diff(np.min(times, axis=0) * 1e6, prepend=0.0).tolist()))
    peer.close()
    return found


if __name__ == "__main__":
    main()
