"""Build the Python packages into a folder: one tree of sources, four wheels, and the sdist of the first.

    python scripts/release/wheels.py dist

`archipel` is the code alone: all that a device needs. `archipel-data` brings the digits by writer, `archipel-web-page`
the browser's page that `archipel serve` shows at /demo/, `archipel-docs` the documentation that it shows at /docs/;
their files go into the package's own folders. The extras `demo` and `server` of the built `archipel` name them, in the
same version. A checkout has the files in place, so there `pip install .` installs everything.

The same sources give the same bytes: the times in the archives are SOURCE_DATE_EPOCH, by default the time of the last
commit, and the tools are those of TOOLS, in an environment of their own.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("build==1.6.1", "setuptools==84.2.1", "wheel==0.48.0", "cyclonedx-bom==7.5.0")
EARLIEST = 315532800
"""1980, before which a zip has no times."""


@dataclass(frozen=True)
class Pack:
    """Files that a wheel of their own brings into a package of archipel.

    extra: the extra of archipel that names the wheel
    package: whose folder the files go into
    files: patterns in that folder
    licenses: those of the files, patterns in LICENSES/
    remedy: what makes the files where there are none
    """

    name: str
    extra: str
    package: str
    files: tuple[str, ...]
    licenses: tuple[str, ...]
    description: str
    remedy: str = "restore them from git"


PACKS = (
    Pack(
        "archipel-data", "demo", "archipel.datasets", ("*.xz",), ("MNIST.txt", "QMNIST.txt"),
        "Handwritten digits by writer, for archipel's demo and examples",
    ),
    Pack(
        "archipel-web-page", "server", "archipel.server.http", ("demo_page/**/*",), ("ONNX-Runtime.txt", "uPlot.txt"),
        "The page in the browser that an archipel server shows at /demo/", "`make web` builds them",
    ),
    Pack(
        "archipel-docs", "server", "archipel.server.http", ("docs_page/**/*",), ("mkdocs-material.txt",),
        "The documentation that an archipel server shows at /docs/", "`make docs` builds them",
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    try:
        for path in build_all(options.folder):
            print(f"{path}  {path.stat().st_size:,} bytes")
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    return 0


def build_all(target: Path) -> list[Path]:
    """Build everything into `target`, in place of what earlier runs built there. Returns the files.

    Raises ValueError for files that are missing or no version, CalledProcessError if a tool fails.
    """
    given = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    python, epoch = tools(), source_date()
    target.mkdir(parents=True, exist_ok=True)
    names = ("archipel", *(pack.name.replace("-", "_") for pack in PACKS))
    for old in (path for name in names for path in target.glob(f"{name}-*")):
        if old.suffix in (".whl", ".gz"):
            old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        _stage_code(stage / "archipel", given)
        (source,) = _build(python, stage / "archipel", "sdist", epoch)
        made = [_repack(source, target, epoch)]
        # The wheel is built of the sdist, as whoever has only that builds it.
        with tarfile.open(source) as archive:
            archive.extractall(stage / "unpacked", filter="data")
        (unpacked,) = (stage / "unpacked").iterdir()
        wheels = _build(python, unpacked, "wheel", epoch)
        for pack in PACKS:
            _stage_pack(stage / pack.name, pack, given["project"])
            wheels += _build(python, stage / pack.name, "wheel", epoch)
        made += [Path(shutil.copy(wheel, target)) for wheel in wheels]
    return made


def tools() -> Path:
    """The Python that has TOOLS. Raises CalledProcessError where they cannot be installed."""
    command = [sys.executable, ROOT / "scripts" / "environment.py", ROOT / ".cache" / "environments" / "release"]
    return Path(subprocess.run([*command, "--", *TOOLS], check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def source_date() -> int:
    """Seconds since 1970 that stand for the time of the build. Raises ValueError."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is None:
        log = ["git", "log", "-1", "--format=%ct"]
        given = subprocess.run(log, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    if not given.isdecimal() or int(given) < EARLIEST:
        raise ValueError(f"SOURCE_DATE_EPOCH: expected seconds since 1970, from {EARLIEST} on, it is {given!r}")
    return int(given)


def _stage_code(stage: Path, given: dict[str, Any]) -> None:
    """The sources of archipel without the packs' files, whose wheels the extras name in their place."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "archipel", "LICENSES"]
    found = subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\0")
    left_out = {path for pack in PACKS for path in _files_of(pack)}
    names = [name for name in found if name and (ROOT / name).is_file() and ROOT / name not in left_out]
    _copy(stage, [ROOT / name for name in names] + [ROOT / "README.md", ROOT / "LICENSE"])
    project = given["project"]
    for pack in PACKS:
        project["optional-dependencies"][pack.extra].append(f"{pack.name}=={project['version']}")
        folder = pack.package.partition(".")[2].replace(".", "/")
        data = given["tool"]["setuptools"]["package-data"]["archipel"]
        data[:] = [pattern for pattern in data if pattern not in {f"{folder}/{each}" for each in pack.files}]
    _write_project(stage, {key: given[key] for key in ("build-system", "project")} | {
        "tool": {"setuptools": given["tool"]["setuptools"]}
    })  # fmt: skip


def _stage_pack(stage: Path, pack: Pack, project: dict[str, Any]) -> None:
    """A project of the pack's files alone."""
    _copy(stage, [*_files_of(pack), ROOT / "LICENSE", *(ROOT / "LICENSES" / name for name in pack.licenses)])
    described = {"name": pack.name, "description": pack.description, "license-files": ["LICENSE", "LICENSES/*"]}
    same = {name: project[name] for name in ("version", "license", "requires-python", "authors")}
    folders = {pack.package: pack.package.replace(".", "/")}
    _write_project(stage, {
        "build-system": {"requires": ["setuptools>=77"], "build-backend": "setuptools.build_meta"},
        "project": described | same,
        "tool": {"setuptools": {
            "packages": [pack.package], "package-dir": folders, "package-data": {pack.package: list(pack.files)},
        }},
    })  # fmt: skip


def _files_of(pack: Pack) -> list[Path]:
    """Raises ValueError where there are none."""
    folder = ROOT.joinpath(*pack.package.split("."))
    files = sorted(path for pattern in pack.files for path in folder.glob(pattern) if path.is_file())
    if not files:
        raise ValueError(f"{folder / pack.files[0]}: no files for the wheel {pack.name}; {pack.remedy}")
    return files


def _copy(stage: Path, files: Iterable[Path]) -> None:
    """With modes that do not depend on the umask of whoever checked the sources out."""
    for file in files:
        copy = stage / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        copy.chmod(0o755 if os.access(file, os.X_OK) else 0o644)


def _write_project(stage: Path, content: dict[str, Any]) -> None:
    (stage / "pyproject.toml").write_text(tomli_w.dumps(content), encoding="utf-8")


def _build(python: Path, project: Path, kind: str, epoch: int) -> list[Path]:
    """The sdist or wheel of a staged project."""
    out = project.parent / f"{project.name}-{kind}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [python, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", out, project],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, umask=0o022, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError(f"{project.name}: its {kind} was not built:\n{done.stdout}")
    return list(out.iterdir())


def _repack(source: Path, target: Path, epoch: int) -> Path:
    """The same archive with the times, owners and modes of no machine, in order."""
    plain = io.BytesIO()
    with tarfile.open(source) as given, tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as made:
        for member in sorted(given.getmembers(), key=lambda member: member.name):
            content = given.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            made.addfile(member, content)
    path = target / source.name
    path.write_bytes(gzip.compress(plain.getvalue(), mtime=epoch))
    return path


if __name__ == "__main__":
    sys.exit(main())
