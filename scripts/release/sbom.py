"""What is in an installation: software bills of materials in CycloneDX's format, the same bytes for the same packages.

Those of Python are read from new environments, which pip fills from the built wheels with the versions of
constraints.txt; so they are those of this kind of machine and this Python. Those of the browser come from npm's lock
files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from wheels import ROOT, source_date, tools

INSTALLATIONS = {"device": "archipel", "server": "archipel[oidc,postgresql,s3]"}
"""What people install, by the name in the file's name."""
PAGES = {"web": "web", "web-page": "web/demo"}
"""Folders with a package-lock.json: of the library for npm, and of what the page has besides."""


def write_bills(target: Path, version: str) -> list[Path]:
    """Write `archipel-NAME-VERSION.cdx.json` into `target`, in which the wheels are. Returns the files.

    Raises CalledProcessError if a tool fails, ValueError for an npm that makes no bills.
    """
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name, wanted in INSTALLATIONS.items():
            path = target / f"archipel-{name}-{version}.cdx.json"
            _describe_installation(Path(folder) / name, target, f"{wanted}=={version}", path)
            made.append(path)
        for name, lock in PAGES.items():
            path = target / f"archipel-{name}-{version}.cdx.json"
            path.write_text(_describe_page(Path(folder) / f"archipel-{name}", ROOT / lock, version), encoding="utf-8")
            made.append(path)
    return made


def _describe_installation(folder: Path, wheels: Path, wanted: str, path: Path) -> None:
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    own = ["--no-index", "--no-deps", "--find-links", wheels]
    # First archipel's own, from here and nowhere else, whatever an index has under these names.
    version = wanted.partition("==")[2]
    packages = ["archipel", *(["archipel-web-page", "archipel-docs"] if "[" in wanted else [])]
    subprocess.run([*pip, *own, *(f"{name}=={version}" for name in packages)], check=True)
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", wanted], check=True)
    subprocess.run(
        [tools().with_name("cyclonedx-py"), "environment", "--output-reproducible", "--pyproject",
         ROOT / "pyproject.toml", "--output-file", path, python],
        env=os.environ | {"SOURCE_DATE_EPOCH": str(source_date())}, check=True,
    )  # fmt: skip


def _describe_page(stage: Path, lock: Path, version: str) -> str:
    stage.mkdir()
    described = json.loads((lock / "package.json").read_text(encoding="utf-8"))
    (stage / "package.json").write_text(json.dumps(described | {"version": version}), encoding="utf-8")
    shutil.copy(lock / "package-lock.json", stage)
    command = ["npm", "sbom", "--package-lock-only", "--omit", "dev", "--sbom-format", "cyclonedx"]
    done = subprocess.run(command, cwd=stage, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"npm sbom failed (npm has it from 10 on): {done.stderr.strip()}")
    bill: dict[str, Any] = json.loads(done.stdout)
    # Which run made it, and when, are all that differs between two runs.
    del bill["serialNumber"], bill["metadata"]["timestamp"]
    return json.dumps(bill, indent=2) + "\n"
