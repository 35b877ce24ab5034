from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.cli.devices.bench import Row, _summarize
from archipel.cli.devices.bench_child import peak_bytes
from tests.support.commands import Command, Linear

QUICK = ["--seconds", "0.05", "--processes", "1"]


@pytest.mark.sampled(every=8)
def test_everything_as_json(linear: Linear, archipel: Command) -> None:
    out, err = archipel("bench", *linear.arguments, *QUICK, "--batch", "3", "--threads", "1,2", "--train", "--json")
    result = json.loads(out)
    assert result["bundle"] == "linear"
    assert [(row["what"], row["threads"], row["batch"]) for row in result["rows"]] == [
        ("predict", 1, 3), ("predict", 2, 3), ("train", 1, 3), ("train", 2, 3)
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["calls"] >= 10
        assert 0 < row["p50_us"] <= row["p90_us"] <= row["p99_us"]
        cold = row["cold_ms"]
        assert all(cold[part] > 0 for part in ("start", "import", "load", "first"))
        assert cold["total"] == pytest.approx(sum(cold[part] for part in ("start", "import", "load", "first")))
        # Python, NumPy and ONNX Runtime alone have more than the one, and the test's own process more than the other.
        assert 30e6 < row["peak_bytes"] < 200e6
        assert row["cpu_s_per_1000"] > 0
    assert result["nodes"]["predict"] == {"cpu": 1}
    assert [row["op_type"] for row in result["profile"]] == ["MatMul"]
    assert result["profile"][0]["output_shapes"] == ["float32[3, 3]"]
    assert "train, threads 2: process 1 of 1" in err


@pytest.mark.sampled(every=4)
def test_the_table(linear: Linear, archipel: Command) -> None:
    out, _ = archipel("bench", *linear.arguments, *QUICK)
    head = next(line for line in out.splitlines() if "p50 us" in line)
    for word in ("threads", "batch", "p90 us", "p99 us", "examples/s", "CPU s/1000", "peak MB"):
        assert word in head
    assert "cold start, ms" in out
    assert "predict: 1 nodes on cpu" in out
    assert "MatMul" in out
    assert "MatMul" not in archipel("bench", *linear.arguments, *QUICK, "--no-profile")[0]


@pytest.mark.sampled(every=4)
def test_own_examples_are_repeated_to_the_batch(linear: Linear, archipel: Command, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 4), np.float32))
    out, _ = archipel("bench", *linear.arguments, *QUICK, "--input", str(tmp_path / "x.npy"), "--batch", "5", "--json")
    assert json.loads(out)["profile"][0]["output_shapes"] == ["float32[5, 3]"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--threads", "many"], "expected numbers of at least 1, such as 1,2,4"),
        (["--threads", "0"], "expected numbers"),
        (["--threads", "1,1"], "expected numbers"),
        (["--input", "nowhere.npy"], "nowhere.npy: No such file"),
        (["--delegate", "gpu"], "'gpu' is not known"),
    ],
)
def test_mistakes_are_one_line(linear: Linear, archipel: Command, options: list[str], text: str) -> None:
    _, err = archipel("bench", *linear.arguments, *QUICK, *options, code=1)
    assert text in err
    assert err.count("\n") == 1


def test_the_summary_is_numpys() -> None:
    rng = np.random.default_rng(0)
    answers: list[dict[str, Any]] = [
        {
            "calls_us": rng.uniform(50, 150, 200).tolist(), "cpu_s": 0.03, "peak_bytes": peak,
            "start_ms": start, "import_ms": 100.0, "load_ms": 5.0, "first_ms": 10.0,
        }
        for start, peak in ((20.0, 70), (90.0, 90), (25.0, 80))
    ]  # fmt: skip
    row = Row("predict", 1, 4)
    _summarize(row, answers)
    calls = np.concatenate([answer["calls_us"] for answer in answers])
    assert row.p50_us == pytest.approx(np.median(calls))
    assert row.p99_us == pytest.approx(np.quantile(calls, 0.99))
    assert row.calls == 600
    assert row.examples_per_s == pytest.approx(4 * 600 / (calls.sum() * 1e-6))
    assert row.cpu_s_per_1000 == pytest.approx(0.15)
    assert row.peak_bytes == 80
    assert row.cold_ms == {"start": 25, "import": 100, "load": 5, "first": 10, "total": 140}


@pytest.mark.sampled(every=4)
def test_the_peak_is_this_process_own() -> None:
    code = (
        "from archipel.cli.devices.bench_child import peak_bytes as p; a = p(); b = bytearray(50 << 20); print(a, p())"
    )
    held = np.ones(100 << 20, np.uint8)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 60e6 < held.nbytes < peak_bytes()
    assert 50e6 < after - before < 60e6


def test_a_batch_that_no_memory_holds_is_refused_before_it_is_made(linear: Linear, archipel: Command) -> None:
    _, err = archipel("bench", *linear.arguments, *QUICK, "--batch", str(10**12), code=1)
    # Four float32, here and in the process that measures, and as the float64 that they are drawn as.
    assert f"--batch {10**12}: its examples need {10**12 * 4 * (2 * 4 + 8):,} bytes of memory, and " in err
    assert err.endswith(" are free here; give a smaller --batch\n")
    assert err.count("\n") == 1
