"""A federation of installed programs, which are called by their commands: a server, three devices, one secure round."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from archipel import bundle, training
from archipel.converter import Signing, Training, convert
from archipel.datasets import digits_by_writer, split_writers
from archipel.models import digits_cnn
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.operator.tasks import TaskInfo

DEVICES = 3
DEVICE_SETTINGS = """\
folder = "agent"
min_cohort = 3
max_wait = 1.0

[examples]
file = "data.npz"
"""
START_SECONDS, STOP_SECONDS, ROUND_SECONDS = 120, 60, 180


def clean_environment() -> dict[str, str]:
    """This process's variables without those that would lead another Python to this one's packages."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV", "VIRTUAL"))}


def run(*command: str | Path, cwd: Path | None = None, code: int = 0) -> str:
    """What the command prints on both pipes; it has to end with `code`."""
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


@contextmanager
def running(
    *command: str | Path, log: Path, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command's process, which is stopped by SIGTERM; what it prints is in `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=cwd, env=clean_environment() | dict(variables or {}), stdout=out, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def publish(folder: Path) -> Path:
    """A bundle of digits_cnn for cohorts of three, signed by the key `publisher` in the folder."""
    published = folder / "digits.bundle"
    convert(
        digits_cnn(seed=0), published, example=np.zeros((2, 1, 28, 28), np.float32),
        training=Training(
            training.losses.cross_entropy(), training.optimizers.sgd(), strategy="fedavg",
            strategy_options={"clip": 1.0, "value_range": 0.5, "bits": 16}, epochs=1, batch_size=10,
        ),
        privacy=bundle.PrivacyPolicy(
            modes=("secure",), min_cohort=3, colluders=0.0, threshold=0.67, max_clip=1.0, max_bits=16
        ),
        signing=Signing(bundle.load_private_key(folder / "publisher")),
    )  # fmt: skip
    return published


def write_examples(path: Path, number: int) -> None:
    """Those of one writer."""
    digits = digits_by_writer()
    own = digits.of(split_writers(digits, devices=DEVICES, seed=0).devices[number : number + 1])
    np.savez(path, input=own.inputs(), label=own.targets())


def federate(
    folder: Path, server: Sequence[str | Path], device: Sequence[str | Path]
) -> tuple[dict[str, str], TaskInfo]:
    """One round of a server and its devices, each a process of the command given; the address ends with the server.

    `server` and `device` begin a command of archipel, such as `[bin / "archipel"]`. Returns what the server answered
    for its pages `demo` and `docs`, and the task.
    """
    for key in ("publisher", "enrolment"):
        run(*server, "keys", key, cwd=folder)
    published = publish(folder)
    run(
        *server, "serve", "init", "federation", "--enrolment-key", "enrolment.pub", "--publisher-key", "publisher.pub",
        "--token-file", "operator.token", cwd=folder,
    )  # fmt: skip
    with ExitStack() as stack:
        log = folder / "server.out"
        process = stack.enter_context(
            running(*server, "serve", "start", "federation", "--port", "0", "--demo", "--docs", log=log, cwd=folder)
        )
        url = address(log, process)
        run(
            *server, "token", "--enrolment-key", "enrolment", "--server-key", "federation/server.key.pub",
            "--publisher-key", "publisher.pub", "--server", url, "--population", "pupils", "--count", str(DEVICES),
            "tokens", cwd=folder,
        )  # fmt: skip
        for number, token in enumerate(sorted((folder / "tokens").iterdir())):
            home = folder / f"device-{number}"
            home.mkdir()
            (home / "device.toml").write_text(DEVICE_SETTINGS)
            write_examples(home / "data.npz", number)
            run(*device, "device", "enroll", "device.toml", token, cwd=home)
            stack.enter_context(running(*device, "device", "run", "device.toml", log=home / "out", cwd=home))
        task = train(url, (folder / "operator.token").read_text().strip(), published)
        pages = {
            name: run("curl", "--silent", "--show-error", "--include", f"{url}/{name}/") for name in ("demo", "docs")
        }
    return pages, task


def train(url: str, token: str, published: Path, population: str = "pupils", rounds: int = 1) -> TaskInfo:
    """A task of the bundle, until it is over."""
    operator = OperatorClient(url, token)
    info = operator.bundles.upload(published)
    task = operator.tasks.create(
        TaskRequest(
            name="digits", population=population, bundle=info.digest, rounds=rounds, min_cohort=3, cohort=DEVICES,
            hyperparameters={"lr": 0.02},
        )
    )  # fmt: skip
    return operator.tasks.wait(task.task_id, timeout=ROUND_SECONDS)


def address(log: Path, process: subprocess.Popen[bytes]) -> str:
    """The server's, as soon as it prints it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"archipel server on (http://127\.0\.0\.1:\d+)", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"the server did not start in {START_SECONDS} s: {log.read_text()}")
