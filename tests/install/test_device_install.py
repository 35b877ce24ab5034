"""`pip install .` in a clean environment: a working device, small, without the cloud's and the server's packages."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from archipel import bundle as b
from archipel import training
from archipel.converter import Signing, Training, convert
from archipel.datasets import digits_by_writer
from archipel.models import digits_cnn

ROOT = Path(__file__).resolve().parents[2]
LIMIT_BYTES = 180 << 20
FOREIGN = (
    "onnx",
    "onnx_ir",
    "onnxscript",
    "torch",
    "flask",
    "sqlalchemy",
    "alembic",
    "gunicorn",
    "fsspec",
    "s3fs",
    "rich",
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that holds what `pip install .` brings, from a copy of the sources."""
    folder = tmp_path_factory.mktemp("clean")
    sources = folder / "sources"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode == 0:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (sources / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, sources / name)
    else:
        shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(".venv", ".git"))
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check",
         "--constraint", str(ROOT / "constraints.txt"), str(sources)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return python


def run(python: Path, code: str, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV"))}
    done = subprocess.run(
        [python, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=python.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sampled(every=8)
def test_it_is_small(clean: Path) -> None:
    site = next((clean.parents[1] / "lib").glob("python3.*/site-packages"))
    # A released device comes without the files that wheels of their own bring: the sources have them in place.
    of_others = {
        path
        for pack in runpy.run_path(str(ROOT / "scripts" / "release" / "wheels.py"))["PACKS"]
        for pattern in pack.files
        for path in site.joinpath(*pack.package.split(".")).glob(pattern)
    }
    assert any(path.name == "digits_by_writer.xz" for path in of_others)
    # Bytes of files: how many blocks they take is the file system's business.
    size = sum(path.lstat().st_size for path in set(site.rglob("*")) - of_others if not path.is_dir())
    assert size < LIMIT_BYTES, f"{size / 2**20:.1f} MiB"
    assert size > 50 << 20  # onnxruntime alone is larger: the measurement did look


@pytest.mark.sampled(every=6)
def test_nothing_foreign_came_along(clean: Path) -> None:
    code = "import importlib.util as u, sys; print([m for m in sys.argv[1:] if u.find_spec(m)])"
    assert run(clean, code, *FOREIGN).strip() == "[]"


@pytest.mark.sampled(every=8)
def test_the_device_predicts_learns_and_takes_part(clean: Path, tmp_path: Path) -> None:
    key = b.generate_key()
    convert(
        digits_cnn(seed=0), tmp_path / "digits.bundle", example=np.zeros((2, 1, 28, 28), np.float32),
        training=Training(training.losses.cross_entropy(), training.optimizers.sgd()), signing=Signing(key),
    )  # fmt: skip
    code = """
import sys
from archipel import lite_runtime as lite
from archipel.client import Agent, AgentConfig
from archipel.datasets import digits_by_writer
from archipel.protocol.secagg import Participant
import archipel.strategies
digits = digits_by_writer()
own = digits.of(digits.writers[:1].tolist())
runtime = lite.load(sys.argv[1], trusted_keys=[bytes.fromhex(sys.argv[2])])
history = runtime.fit(own.inputs(), own.targets(), epochs=5, batch_size=16, hyperparameters={"lr": 0.05})
update = runtime.local_round({"input": own.inputs(), "label": own.targets()}, seed=0)
print(len(own), runtime.predict(own.inputs()).shape[0], history.losses[0] > history.losses[-1], update.examples)
"""
    out = run(clean, code, str(tmp_path / "digits.bundle"), key.public_key().public_bytes_raw().hex()).split()
    count = str(int(np.sum(digits_by_writer().writers == digits_by_writer().writers[0])))
    assert out == [count, count, "True", count]


@pytest.mark.sampled(every=8)
def test_commands_say_which_extra_is_missing(clean: Path, tmp_path: Path) -> None:
    archipel = clean.parent / "archipel"
    out = subprocess.run([archipel, "--help"], capture_output=True, text=True, check=True).stdout
    assert "demo" in out
    out = subprocess.run([archipel, "doctor"], capture_output=True, text=True, check=True).stdout
    assert "device (base) ok" in out
    assert "pip install 'archipel[server]'" in out
    settings = str(tmp_path / "device.toml")
    subprocess.run([archipel, "device", "init", settings], capture_output=True, check=True)
    done = subprocess.run([archipel, "device", "run", settings], capture_output=True, text=True, check=False)
    assert (done.returncode, "not enrolled yet" in done.stderr) == (78, True), done.stderr
    for command, extra in ((["demo"], "demo"), (["serve", "start", "x"], "server")):
        done = subprocess.run([archipel, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert f"archipel[{extra}]" in done.stderr
    code = """
import archipel, archipel.errors
try:
    archipel.Model
except archipel.errors.MissingExtraError as error:
    print(error)
"""
    assert "archipel[convert]" in run(clean, code)
