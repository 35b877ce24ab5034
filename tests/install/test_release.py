"""`make release`: all that is published, the same bytes twice, with sums that hold and bills of what is inside."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import archipel
from archipel.server.http.documentation import DOCS_FOLDER
from archipel.server.http.pages import PAGE_FOLDER
from tests.support.environments import other_python
from tests.support.fixtures.chromium import needed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "release" / "release.py"
FILES = [
    "SHA256SUMS",
    "archipel-V-py3-none-any.whl",
    "archipel-V.tar.gz",
    "archipel-device-V.cdx.json",
    "archipel-server-V.cdx.json",
    "archipel-web-V.cdx.json",
    "archipel-web-V.tgz",
    "archipel-web-page-V.cdx.json",
    "archipel_data-V-py3-none-any.whl",
    "archipel_docs-V-py3-none-any.whl",
    "archipel_web_page-V-py3-none-any.whl",
]
VALIDATE = """
import sys
from pathlib import Path
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
for name in sys.argv[1:]:
    text = Path(name).read_text()
    version = next(each for each in SchemaVersion if f'"specVersion": "{each.to_version()}"' in text)
    print(JsonStrictValidator(version).validate_str(text))
"""


def make(target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, target], capture_output=True, text=True, check=False)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    # The kernel pack's wheel is built into dist/ as well, and is no part of this.
    mine = ["archipel_kernels-0.1.0-py3-none-linux_x86_64.whl", "thesis.txt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    done = make(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"release.py: {tmp_path}: has files of no release: {', '.join(mine)}; name an empty folder\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == mine


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (PAGE_FOLDER / "index.html").is_file() or not (ROOT / "web" / "node_modules").is_dir():
        needed("needs the demo page and web/node_modules; `make web` makes both")
    if not (DOCS_FOLDER / "index.html").is_file():
        needed("needs the documentation; `make docs` builds it")
    if shutil.which("npm") is None:
        needed("needs npm; scripts/install_browser.sh --yes installs it")
    folder = tmp_path_factory.mktemp("release")
    done = make(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_a_release_is_complete_and_its_sums_hold(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [name.replace("V", archipel.__version__) for name in FILES]
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    told = subprocess.run(check, cwd=dist, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == [f"{path.name}: OK" for path in sorted(dist.iterdir()) if path.name != "SHA256SUMS"]


@pytest.mark.slow
def test_a_second_release_has_the_same_bytes(dist: Path, tmp_path: Path) -> None:
    done = make(tmp_path / "again")
    assert done.returncode == 0, done.stderr
    first = {path.name: path.read_bytes() for path in dist.iterdir()}
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert sorted(name for name in first if first[name] != again.get(name)) == []


@pytest.mark.slow
def test_the_bills_name_what_is_installed_and_keep_to_the_standard(dist: Path) -> None:
    bills = sorted(dist.glob("*.cdx.json"))
    python = other_python("release", *tools())
    done = subprocess.run([python, "-c", VALIDATE, *bills], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["None"] * len(bills), done.stdout + done.stderr

    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    pinned = {plain(name): version for name, version in pinned.items()}
    device, server = (components(dist / f"archipel-{name}-{archipel.__version__}.cdx.json") for name in WHERE)
    ours = {"archipel": archipel.__version__}
    assert {name: device.pop(name) for name in ours} == ours
    ours |= dict.fromkeys(("archipel-web-page", "archipel-docs"), archipel.__version__)
    assert {name: server.pop(name) for name in ours} == ours
    for found in (device, server):
        assert {name: pinned.get(name) for name in found} == found
    assert {"numpy", "onnxruntime", "cryptography", "msgspec", "safetensors", "urllib3", "click"} <= set(device)
    assert {"authlib", "flask", "sqlalchemy", "psycopg", "s3fs"} <= set(server)
    assert not {"flask", "torch", "onnx"} & set(device)
    assert not {"torch", "onnx", "pytest"} & set(server)
    web = components(dist / f"archipel-web-{archipel.__version__}.cdx.json")
    assert "onnxruntime-web" in web
    assert "vite" not in web


WHERE = ("device", "server")


def components(bill: Path) -> dict[str, str]:
    """Versions by name, with that of what the bill is about."""
    found: dict[str, Any] = json.loads(bill.read_text())
    return {plain(each["name"]): each["version"] for each in (found["metadata"]["component"], *found["components"])}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def tools() -> list[str]:
    """What scripts/release/ installs for itself."""
    text = (ROOT / "scripts" / "release" / "wheels.py").read_text()
    (line,) = re.findall(r"^TOOLS = \((.*)\)$", text, re.M)
    return re.findall(r'"(.*?)"', line)
