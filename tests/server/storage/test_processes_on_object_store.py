"""The real thing on an object store: supervisor, gunicorn and coordinator as processes, a secure round over TCP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.operator import OperatorClient
from tests.server.processes.test_processes import (  # noqa: F401 - its fixtures
    SERVE,
    Server,
    fleet,
    in_threads,
    operator,
    server,
    take_part,
    task_request,
    wait_until,
)
from tests.support.devices import Device
from tests.support.moto_process import TestBucket
from tests.support.patience import stretched
from tests.support.world import DataFolder


@pytest.fixture(autouse=True)
def on_bucket(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> TestBucket:
    monkeypatch.setenv("ARCHIPEL_SERVER_BLOBS", bucket.url)
    monkeypatch.setenv("ARCHIPEL_SERVER_WORKERS", "2")
    return bucket


@pytest.mark.sampled(every=8)
def test_a_secure_round_while_a_web_process_and_the_coordinator_are_killed(
    server: Server,  # noqa: F811
    operator: OperatorClient,  # noqa: F811
    fleet: list[Device],  # noqa: F811
    bundle_maker: Callable[..., Path],
    data_folder: DataFolder,
    tmp_path: Path,
    on_bucket: TestBucket,
) -> None:
    file = bundle_maker(tmp_path, data_folder[2].publisher)
    info = operator.bundles.upload(file)
    assert operator.bundles.download(info.digest) == file.read_bytes()
    task = operator.tasks.create(task_request(info.digest, rounds=2))
    for number, device in enumerate(fleet, start=1):
        device.vector = np.full(9, 256 * number, np.uint32)
        device.vector[8] = 4096
    threads = in_threads([lambda device=device: take_part(device, 2) for device in fleet])
    wait_until(lambda: operator.tasks.get(task.task_id).rounds_committed == 1, 30)
    children = server.children()
    for name in ("coordinator", "worker"):
        os.kill(children[name], signal.SIGKILL)
    done = operator.tasks.wait(task.task_id, timeout=stretched(30), poll=0.05)
    for thread in threads:
        thread.join()
    assert (done.state, done.rounds_committed) == ("completed", 2)
    np.testing.assert_array_equal(operator.weights.read(done.model)["w"], np.full((3, 2), 6.0, np.float32))
    assert not (server.folder / "blobs").exists()
    wait_until(lambda: not any(key.startswith("updates/") for key in on_bucket.objects()))
    operator.close()
    assert server.stop() == 0
    # Neither logs nor the data folder know the credentials.
    secret = os.environ["AWS_SECRET_ACCESS_KEY"].encode()
    for path in server.folder.rglob("*"):
        assert not path.is_file() or secret not in path.read_bytes()


@pytest.mark.sampled(every=4)
def test_a_store_that_cannot_be_used_is_said_in_one_line(
    server: Server,  # noqa: F811
    on_bucket: TestBucket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ARCHIPEL_SERVER_BLOBS", f"s3://{on_bucket.name}x/prefix")
    command = [sys.executable, "-c", SERVE, str(server.folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"Error: setting blobs: s3://{on_bucket.name}x/prefix: there is no such bucket; "
        "make it, or correct the setting (NoSuchBucket)\n"
    )
