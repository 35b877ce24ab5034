"""Nodes of the kernel pack with hostile shapes and attributes: an error or PyTorch's answer, no crash, bounded time."""

from __future__ import annotations

import json
import os
import random
import select
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel.lite_runtime.engines.kernels import KernelPack
from tests.support.kernel_pack import build_package

WORKER = Path(__file__).parent / "fuzz_worker.py"
CORPUS = Path(__file__).parent / "corpus" / "nodes.json"
SECONDS = 20.0
HOSTILE = [0, -1, -2, 1000, 2**20 - 1, 2**20, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
SANITIZERS = ("-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")

Case = dict[str, Any]


def convolution(rng: random.Random, operator: str) -> Case:
    group, per_group = (
        (rng.choice([2, 3, 5, 17]), 1) if rng.random() < 0.5 else (rng.choice([1, 2]), rng.choice([1, 3]))
    )
    filters, batch = group * rng.choice([1, 1, 1, 2]), rng.choice([0, 1, 2, 5])
    strides, dilations = ([rng.choice([1, 1, 2, 3]) for _ in range(2)] for _ in range(2))
    kernel, size = [rng.choice([1, 2, 3, 5]) for _ in range(2)], [rng.choice([1, 3, 8, 9, 20]) for _ in range(2)]
    pads = [rng.choice([0, 1, 2, 9]) for _ in range(4)]
    if rng.random() < 0.3:  # as wide as before
        pads = [d * (k - 1) // 2 for d, k in zip(dilations, kernel)] * 2
    if rng.random() < 0.15:  # large, and shapes that fit all the same
        axis, large = rng.randrange(2), rng.choice([50, 30_000, 2**18, 2**20 - 1])
        strides[axis] = large
        pads[axis] = rng.choice([0, large // 2, large - 1])
    room = [size[i] + pads[i] + pads[i + 2] - dilations[i] * (kernel[i] - 1) - 1 for i in range(2)]
    out = [max(0, each // stride + 1) for each, stride in zip(room, strides)]
    x, w, y = [batch, group * per_group, *size], [filters, per_group, *kernel], [batch, filters, *out]
    attributes: Case = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    if operator == "Conv":
        return {"attributes": attributes, "shapes": [x, w, [filters]][: rng.choice([2, 3])]}
    if operator == "ConvGradInput":
        return {"attributes": {**attributes, "input_size": size}, "shapes": [y, w]}
    return {"attributes": {**attributes, "kernel_shape": kernel}, "shapes": [x, y]}


def normalization(rng: random.Random, operator: str) -> Case:
    rank = rng.choice([2, 3, 4, 5])
    x = [rng.choice([0, 1, 2, 5]), rng.choice([1, 3, 8, 17]), *[rng.choice([1, 3, 16, 17]) for _ in range(rank - 2)]]
    row = [x[1]]
    shapes = [x, row, row] if operator == "BatchNorm" else [x, x, row, row, row]
    return {"attributes": {"epsilon": rng.choice([1e-5, 1e-3])}, "shapes": [list(shape) for shape in shapes]}


def mask(rng: random.Random, operator: str) -> Case:
    shape = [rng.choice([0, 1, 3, 17, 200]) for _ in range(rng.randrange(4))]
    return {"attributes": {}, "shapes": [list(shape) for _ in range(2 if operator == "ReluGrad" else 3)]}


def recurrent(rng: random.Random, operator: str) -> Case:
    steps, batch, hidden = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 16, 17, 71]), rng.choice([1, 2, 7, 24, 25])
    features = rng.choice([1, 3, 17] if operator == "LSTM" else [0, 1, 3, 17])
    if rng.random() < 0.1:
        hidden, batch = rng.choice([137, 280]), rng.choice([1, 18])  # more than one block of a product
    match rng.randrange(16):
        case 0:
            hidden = 0
        case 1:
            steps, batch = rng.choice([2, 2**31, 2**40]), 0
        case 2:
            steps, features = rng.choice([0, 1]), 0
    row, w, r = [hidden, batch], [4 * hidden, features], [4 * hidden, hidden]
    if operator == "LSTM":
        shapes = [[steps, features, batch], w, r, row, row]
    else:
        shapes = [*[[steps, *row]] * 6, r, w, row, row, [steps, *row]][: rng.choice([10, 11, 11])]
    case: Case = {"attributes": {"reverse": rng.choice([0, 1])}, "shapes": [list(shape) for shape in shapes]}
    match rng.randrange(12):
        case 0 | 1:
            # Weights that are no number would reach PyTorch's gradients by way of its results as well.
            index = rng.randrange(5) if operator == "LSTM" else rng.randrange(8, len(shapes))
            # What is infinite meets exact zeros of gates in R alone.
            case["put"] = [index, rng.choice(["nan"] if (operator, index) == ("LSTM", 2) else ["nan", "inf", "-inf"])]
        case 2:
            case["absent"] = rng.choice([10, rng.randrange(11)]) if operator == "LSTMGrad" else rng.randrange(5)
        case 3:
            case["float64"] = rng.randrange(len(shapes))
    return case


MAKE = {
    "Conv": convolution, "ConvGradInput": convolution, "ConvGradWeight": convolution,
    "BatchNorm": normalization, "BatchNormGrad": normalization, "ReluGrad": mask, "ClipGrad": mask,
    "LSTM": recurrent, "LSTMGrad": recurrent,
}  # fmt: skip


def change(rng: random.Random, case: Case) -> None:
    """Another number, or another count of numbers, in an attribute or a shape."""
    name = rng.choice([*case["attributes"], "", ""])
    numbers = case["attributes"].get(name) if name else rng.choice(case["shapes"])
    match rng.randrange(8):
        case 0 if isinstance(numbers, list) and numbers:
            del numbers[rng.randrange(len(numbers))]
        case 1 if isinstance(numbers, list):
            numbers.insert(rng.randrange(len(numbers) + 1), 1)
        case 2 if name:
            case["attributes"][name] = rng.choice([[], 0.5, "x", 3, HOSTILE])
        case 3 if name:
            del case["attributes"][name]
        case 4 if not name and 0 in numbers:
            numbers[rng.randrange(len(numbers))] = rng.choice([2**31, 2**32, 2**40])
        case _ if isinstance(numbers, list) and numbers:
            few = [0, 1, 2, 3, 8]
            numbers[rng.randrange(len(numbers))] = rng.choice(HOSTILE if name and rng.random() < 0.6 else few)
        case _ if name:
            case["attributes"][name] = rng.choice(HOSTILE) if isinstance(numbers, int) else -1.0


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    operator = rng.choice([*MAKE, "Conv", "ConvGradInput", "ConvGradWeight", "LSTM", "LSTMGrad"])
    case = {"operator": operator, **MAKE[operator](rng, operator), "threads": rng.choice([1, 2, 7])}
    for _ in range(rng.choice([0, 0, 1, 2])):
        change(rng, case)
    if "float64" not in case and rng.random() < 0.1:
        case["misplaced"] = rng.randrange(9)
    return case


def run(cases: Iterable[Case], package: Path, folder: Path, **variables: str) -> Iterator[str]:
    """What the worker says about each case. A dead or busy worker ends it, and what it said last is a finding."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path]), **variables}
    with subprocess.Popen(
        [sys.executable, str(WORKER), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        for case in cases:
            if line:
                process.stdin.write(f"{json.dumps(case)}\n")
                process.stdin.flush()
                ready = select.select([process.stdout], [], [], SECONDS)[0]
                line = process.stdout.readline() if ready else ""
            if not line:
                process.kill()
                yield f"died: {process.stderr.read()[-3000:]}"
                return
            yield line.rstrip("\n")


def check(cases: list[Case], answers: Iterable[str]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for case, answer in zip(cases, answers):
        kind = answer.partition(":")[0]
        seen[kind] += 1
        assert kind in ("same", "refused", "no reference"), f"{json.dumps(case)}: {answer}"
    return seen


def check_random(seeds: range, package: Path, folder: Path) -> None:
    cases = [random_case(seed) for seed in seeds]
    seen = check(cases, run(cases, package, folder))
    assert min(seen["same"], seen["refused"]) > len(seeds) / 5, seen


@pytest.mark.sampled(every=8)
def test_random_nodes(pack: KernelPack, tmp_path: Path) -> None:
    check_random(range(300), Path(str(pack.library)).parents[1], tmp_path)


@pytest.mark.sampled(every=4)
def test_the_kept_corpus(pack: KernelPack, tmp_path: Path) -> None:
    """Each case names the beginning of its answer, or the words of an error."""
    cases = json.loads(CORPUS.read_text())
    answers = run(cases, Path(str(pack.library)).parents[1], tmp_path)
    for case, answer in zip(cases, answers, strict=True):
        assert case["answer"] in answer, f"{json.dumps(case)}: {answer}"


@pytest.mark.slow
@pytest.mark.parametrize("level", ["v2", "v3"])
def test_loops_of_other_processors(level: str, tmp_path: Path) -> None:
    if level == "v3" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    package = build_package(tmp_path, f"-DONLY_LEVEL={level}")
    check_random(range(1000, 2500), package.parent, tmp_path)


@pytest.mark.slow
def test_random_nodes_with_sanitizers(tmp_path: Path) -> None:
    package = build_package(tmp_path, *SANITIZERS)
    names = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libubsan")
    ]
    if not all(Path(name).is_absolute() for name in names):
        pytest.skip("g++ came without its sanitizers")
    options = "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=3000:alloc_dealloc_mismatch=0"
    cases = [*json.loads(CORPUS.read_text()), *map(random_case, range(1000, 5000))]
    check(cases, run(cases, package.parent, tmp_path, LD_PRELOAD=":".join(names), ASAN_OPTIONS=options))
