"""The wheels of `make dist`: the same bytes twice, and in clean environments a small device, a server and a round."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from archipel.server.http.documentation import DOCS_FOLDER
from archipel.server.http.pages import PAGE_FOLDER
from tests.support.commanded import federate, run
from tests.support.fixtures.chromium import needed

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 3 << 20
"""Of the wheel that every device takes."""

pytestmark = pytest.mark.slow


def build(target: Path, **variables: str) -> dict[str, bytes]:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "release" / "wheels.py", target],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (PAGE_FOLDER / "index.html").is_file():
        needed("needs the demo page; `make web` builds it")
    if not (DOCS_FOLDER / "index.html").is_file():
        needed("needs the documentation; `make docs` builds it")
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


def environment(folder: Path, dist: Path, *wanted: str) -> Path:
    """The commands of a new environment with these wheels of `dist`, as `name` or `name[extra]`."""
    venv.create(folder, with_pip=False)
    wheels = []
    for name in wanted:
        plain, _, extra = name.partition("[")
        (wheel,) = dist.glob(f"{plain.replace('-', '_')}-*.whl")
        wheels.append(f"{wheel}[{extra}" if extra else str(wheel))
    run(
        sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet",
        "--disable-pip-version-check", "--constraint", ROOT / "constraints.txt", *wheels,
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture(scope="module")
def device(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("device") / "env", dist, "archipel")


def test_the_same_sources_give_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    first = {path.name: path.read_bytes() for path in dist.iterdir()}
    before = os.umask(0o077)
    try:
        os.utime(ROOT / "archipel" / "errors.py")
        again = build(tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C")
    finally:
        os.umask(before)
    assert sorted(first) == sorted(again)
    assert len(first) == 5
    assert [name for name in first if first[name] != again[name]] == []
    later = build(tmp_path / "later", SOURCE_DATE_EPOCH="1900000000")
    assert all(first[name] != later[name] for name in first), "the time is in none of them"


def test_a_device_takes_neither_data_nor_page(dist: Path) -> None:
    (wheel,) = dist.glob("archipel-*.whl")
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert "archipel/client/agent.py" in names
    assert [name for name in names if name.endswith(".xz") or "demo_page" in name or "docs_page" in name] == []


def test_what_is_missing_is_named_with_its_remedy(device: Path, dist: Path) -> None:
    code = """
from archipel.datasets import digits_by_writer
from archipel.errors import DatasetError
try:
    print(len(digits_by_writer()))
except DatasetError as error:
    print(error)
"""
    assert "pip install archipel-data" in run(device / "python", "-I", "-c", code)
    (data,) = dist.glob("archipel_data-*.whl")
    run(sys.executable, "-m", "pip", "--python", device / "python", "install", "--quiet", "--no-deps", data)
    try:
        assert run(device / "python", "-I", "-c", code) == "27438\n"
    finally:
        run(
            sys.executable, "-m", "pip", "--python", device / "python", "uninstall", "--quiet", "--yes", "archipel-data"
        )
    assert "pip install archipel-data" in run(device / "python", "-I", "-c", code)


def test_a_server_and_three_devices_take_a_round(device: Path, dist: Path, tmp_path: Path) -> None:
    server = environment(tmp_path / "env", dist, "archipel[server]", "archipel-web-page", "archipel-docs")
    folder = tmp_path / "federation"
    folder.mkdir()
    pages, task = federate(folder, [server / "archipel"], [device / "archipel"])
    assert (task.state, task.rounds_committed) == ("completed", 1)
    for page in pages.values():
        assert page.startswith("HTTP/1.1 200")
        assert "<!doctype html>" in page.lower()
    said = run(server / "archipel", "doctor")
    assert "archipel-web-page" not in said
    assert "archipel-docs" not in said
    shutil.rmtree(tmp_path / "env")


def test_the_extras_name_their_wheels(device: Path) -> None:
    said = run(device / "archipel", "doctor")
    missing = {line.split()[0]: line for line in said.splitlines() if " missing: " in line}
    assert "archipel-web-page" in missing["server"]
    assert "archipel-docs" in missing["server"]
    assert "archipel-data" in missing["demo"]
