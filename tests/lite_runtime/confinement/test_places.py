"""Which files a process that runs graphs is left with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import onnxruntime
import pytest

import archipel
from archipel.lite_runtime import confinement
from archipel.lite_runtime.confinement import places
from archipel.lite_runtime.engines.delegates import PROVIDERS


@pytest.mark.parametrize(
    ("delegates", "expected"),
    [
        ("auto", ()),  # the CPU's build of ONNX Runtime
        ("cpu", ()),
        ("cuda", ("cuda",)),
        (["coreml", "cpu"], ("coreml",)),
        ([("qnn", {"backend_path": "x"}), "cpu"], ("qnn",)),
        ("torch", ("torch",)),
        (["torch:cuda:1", "cpu"], ("torch",)),
        ([("torch", {"device": "cpu"})], ("torch:cpu",)),
        ({"predict": ["xnnpack", "cpu"], "train": "cpu"}, ("xnnpack",)),
    ],
)
def test_delegates_that_are_asked_for(delegates: Any, expected: tuple[str, ...]) -> None:
    assert confinement.asked_for(delegates) == expected


def test_needs() -> None:
    assert set(places.NEEDS) <= {*PROVIDERS, "torch", "torch:cpu"}
    assert confinement.needs_of(["torch:cpu"]) == places.Needs()
    assert {"/dev/nvidia0", "/dev/kfd"} <= set(confinement.needs_of(["torch"]).devices)
    assert confinement.needs_of(["coreml"]) == places.Needs()
    both = confinement.needs_of(["cuda", "tensorrt", "openvino"])
    assert both.devices.count("/dev/nvidiactl") == 1
    assert "/dev/dri" in both.devices
    assert both.environment.count("LD_LIBRARY_PATH") == 1


def test_paths_in_options(tmp_path: Path) -> None:
    (tmp_path / "driver.so").touch()
    options = {
        "backend_path": str(tmp_path / "driver.so"),
        "other": "relative.so",
        "gone": str(tmp_path / "gone"),
        "n": 3,
    }
    assert confinement.option_paths({"predict": [("qnn", options), "cpu"]}) == [str(tmp_path / "driver.so")]
    assert confinement.option_paths("auto") == []


def test_libraries_are_not_everything() -> None:
    """The folder that a checkout is imported from, the home folder and the root are not among them, nor above them."""
    found = [Path(path) for path in confinement.libraries()]
    source = Path(archipel.__file__).parent
    assert source in found
    for closed in (
        source.parent if (source.parent / "pyproject.toml").exists() else Path("/"),
        Path.home(),
        Path("/etc"),
    ):
        assert not [path for path in found if closed.is_relative_to(path)], closed


def test_another_process_finds_the_same_packages(tmp_path: Path) -> None:
    code = "import archipel, numpy, onnxruntime; print(archipel.__file__, numpy.__file__, onnxruntime.__file__)"
    command = [sys.executable, "-P", "-c", confinement.START_PYTHON + code, confinement.package_roots()]
    done = subprocess.run(command, env={}, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [archipel.__file__, numpy.__file__, onnxruntime.__file__]


@pytest.mark.sampled(every=3)
def test_more_than_one_thread_is_an_error() -> None:
    """Landlock holds the thread that asks and those it starts: others would keep all rights, so nothing is begun."""
    code = "import threading, time; threading.Thread(target=time.sleep, args=(1,), daemon=True).start()\n"
    code += "from archipel.lite_runtime.confinement import restrict\nrestrict([], [])"
    command = [sys.executable, "-P", "-c", confinement.START_PYTHON + code, confinement.package_roots()]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert "2 threads run already" in done.stderr


def test_a_scratch_folder_that_others_could_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement.scratch.tempfile, "tempdir", str(tmp_path))
    root = tmp_path / f"archipel-scratch-{os.getuid()}"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write there"):
        confinement.Scratch()
    root.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root.symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        confinement.Scratch()
