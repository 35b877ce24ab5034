"""Every dependency, in the version of constraints.txt, has a wheel for Linux on arm64, and a device's are of its code.

The index is asked by uv, because pip decides by the machine it runs on which packages a machine of another kind needs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.environments import other_python

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GLIBC = "2_28"
"""The oldest on which what a device, a server and a training need has wheels; docs/deployment.md says so."""
OPENVINO_GLIBC = "2_35"
ELSEWHERE = {"onednn-cpu-gomp", "onednn-devel-cpu-gomp", "tzdata"}
"""Pinned, but not for Linux on arm64, or not for every Python."""
AARCH64 = 183
"""EM_AARCH64, in the table of machines of the ELF specification for AArch64."""


def resolve(extras: list[str], python: str, glibc: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What archipel with these extras installs there, of wheels alone; nothing is downloaded but their metadata."""
    uv = other_python("uv", "uv==0.13.9").with_name("uv")
    return subprocess.run(
        [uv, "pip", "compile", "--quiet", "--no-config", "--no-annotate", "--no-header",
         "--cache-dir", folder, "--only-binary", ":all:", "--python-platform", f"aarch64-manylinux_{glibc}",
         "--python-version", python, "--constraint", ROOT / "constraints.txt",
         *(word for name in extras for word in ("--extra", name)), ROOT / "pyproject.toml"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def versions(text: str) -> dict[str, str]:
    found = re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uv")


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11.9", "3.12", "3.13"])
def test_every_pinned_package_has_a_wheel(python: str, cache: Path) -> None:
    everything = sorted(PROJECT["optional-dependencies"])
    done = resolve(everything, python, OPENVINO_GLIBC, cache)
    assert done.returncode == 0, done.stderr
    found, pinned = versions(done.stdout), versions((ROOT / "constraints.txt").read_text())
    assert set(pinned) - set(found) <= ELSEWHERE
    assert {name: found[name] for name in pinned if name in found} == {
        name: version for name, version in pinned.items() if name in found
    }


@pytest.mark.slow
def test_older_systems_have_all_but_openvino(cache: Path) -> None:
    others = sorted(set(PROJECT["optional-dependencies"]) - {"dev", "openvino"})
    done = resolve(others, "3.11.9", GLIBC, cache)
    assert done.returncode == 0, done.stderr
    assert {"numpy", "onnxruntime", "torch", "flask", "psycopg-binary"} <= set(versions(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(("extras", "glibc", "package"), [(["openvino"], GLIBC, "openvino"), ([], "2_17", "numpy")])
def test_what_has_none_is_named(extras: list[str], glibc: str, package: str, cache: Path) -> None:
    done = resolve(extras, "3.13", glibc, cache)
    assert done.returncode != 0
    assert re.search(rf"{package}==\S+ has no (usable )?wheels", done.stderr), done.stderr


@pytest.mark.slow
def test_a_device_s_wheels_are_of_arm64_s_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", tmp_path,
         "--only-binary=:all:", "--platform", f"manylinux_{GLIBC}_aarch64", "--platform", "manylinux_2_27_aarch64",
         "--platform", "manylinux2014_aarch64", "--platform", "manylinux_2_17_aarch64", "--python-version", "3.13",
         "--constraint", ROOT / "constraints.txt", *PROJECT["dependencies"]],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled = set()
    for path in tmp_path.iterdir():
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                start = wheel.open(name).read(20)
                if start.startswith(b"\x7fELF"):
                    assert int.from_bytes(start[18:20], "little") == AARCH64, f"{path.name}: {name}"
                    compiled.add(path.name.partition("-")[0])
    assert compiled >= {"numpy", "onnxruntime", "cryptography", "msgspec"}
