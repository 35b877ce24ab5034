from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from onnx import parser

from archipel import bundle as b
from archipel.bundle.roles import Example, Output, Parameter
from archipel.cli.devices.slots import slots as group
from archipel.errors import ArchipelError
from archipel.lite_runtime import load
from archipel.lite_runtime.slots.model_slots import Slots

X = np.array([[1.0, 2.0]], np.float32)
GRAPH = """<ir_version: 10, opset_import: ["": 21]>
predict (float[n, 2] x, float[2] w) => (float[n, 2] y) { y = Mul(x, w) }"""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two bundles (times 2, times 3), one whose self-test is wrong, and the key's public half."""
    folder = tmp_path_factory.mktemp("models")
    key = b.generate_key()
    b.save_public_key(key, folder / "key.pub")
    graph = parser.parse_model(GRAPH).SerializeToString()
    found: dict[str, Path] = {"key": folder / "key.pub"}
    for name, factor, tested in (("two", 2, 2), ("three", 3, 3), ("wrong", 4, 5)):
        w = np.full(2, factor, np.float32)
        ports: dict[str, Any] = {"dtype": "float32", "shape": ("n", 2)}
        b.write_bundle(
            folder / name,
            name=name,
            programs={
                "predict": b.Program(
                    kind="predict",
                    file="predict.onnx",
                    inputs=(Example(name="x", **ports), Parameter(name="w", tensor="w", dtype="float32", shape=(2,))),
                    outputs=(Output(name="y", **ports),),
                )
            },
            graphs={"predict.onnx": graph},
            weights=b.write_weights({"w": w}),
            parameters=b.parameter_specs({"w": w}, ["w"]),
            limits=b.Limits(peak_bytes=1000, flops_per_example=1, upload_bytes=1),
            privacy=b.PrivacyPolicy(modes=("plain",), min_cohort=2, threshold=0.6, max_clip=1.0, max_bits=16),
            key=key,
            self_test=(
                b.SelfTest(file="t.safetensors", rtol=0.0, atol=0.0),
                b.write_weights({"example/x": X, "output/y": X * tested}),
            ),
        )
        found[name] = folder / name
    return found


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(group, [str(argument) for argument in arguments])
    if isinstance(result.exception, ArchipelError):
        assert code == 1, result.exception
        text = str(result.exception)
        assert "\n" not in text
        return text
    assert result.exit_code == code, result.output
    return result.output


def test_the_life_of_a_model(device: dict[str, Path], tmp_path: Path) -> None:
    folder, key = tmp_path / "slots", ("--key", device["key"])
    assert "no such folder; `archipel slots install` makes one" in run("show", folder, code=1)
    assert run("install", folder, device["two"], *key).startswith("slot a: staged 'two', digest ")
    assert "slot a: active, on trial; self-test: predict on 1 example, largest deviation: y 0" in run(
        "switch", folder, *key
    )
    assert run("confirm", folder) == "slot a: good\n"
    b.pack(device["three"], tmp_path / "three.bundle")
    run("install", folder, tmp_path / "three.bundle", *key)
    run("switch", folder, *key)
    shown = run("show", folder, *key).splitlines()
    digests = {
        name: b.open_bundle(device[name], [b.load_public_key(device["key"])]).digest for name in ("two", "three")
    }
    assert shown == [
        f"  a  good    'two', digest {digests['two']}",
        f"* b  trying  'three', digest {digests['three']}, 3 starts left",
    ]
    np.testing.assert_array_equal(load(folder / "b", [b.load_public_key(device["key"])]).predict(X), X * 3)
    assert run("rollback", folder, *key, "--reason", "too slow") == "slot a: active again\n"
    assert "     too slow" in run("show", folder).splitlines()
    assert "nothing to return to" in run("rollback", folder, *key, code=1)


def test_errors_are_one_line(device: dict[str, Path], tmp_path: Path) -> None:
    folder, key = tmp_path / "slots", ("--key", device["key"])
    assert "no slot is staged; install a bundle first" in run("switch", folder, *key, code=1)
    assert "no slot is active" in run("confirm", folder, code=1)
    assert "needs up to 1000 bytes" in run("install", folder, device["two"], *key, "--memory-limit", 10, code=1)
    run("install", folder, device["wrong"], *key)
    assert "output 'y' deviates" in run("switch", folder, *key, code=1)
    run("install", folder, device["two"], *key)
    run("switch", folder, *key)
    with Slots(folder, [b.load_public_key(device["key"])]):
        assert "owns it" in run("show", folder, code=1)
    weights = folder / "a" / "bundle" / b.WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    assert "slot a: " in run("show", folder, *key, code=1)
    assert "SHA-256" in run("show", folder, *key, code=1)
    run("show", folder)  # without a key nothing is verified


@pytest.mark.sampled(every=4)
def test_a_crash_while_switching_by_hand_counts(device: dict[str, Path], tmp_path: Path) -> None:
    folder, key = tmp_path / "slots", ("--key", device["key"])
    run("install", folder, device["two"], *key)
    code = (
        "import os, onnxruntime; onnxruntime.InferenceSession = lambda *a, **k: os._exit(9)\n"
        "from archipel.cli.devices.slots import slots; slots()"
    )
    command = [sys.executable, "-c", code, "switch", str(folder), "--key", str(device["key"])]
    assert subprocess.run(command, timeout=60, check=False).returncode == 9
    assert "2 starts left" in run("show", folder)


def test_the_help_teaches() -> None:
    text = run("--help")
    for word in ("install FOLDER", "on trial", "last good"):
        assert word in text
    for command in group.commands.values():
        assert len(command.help or "") > 40
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, (command.name, parameter.name)
