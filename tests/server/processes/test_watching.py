"""Somebody waits for a task while the server is restarted."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from archipel.errors import UnreachableError
from archipel.operator import OperatorClient, TaskRequest
from tests.support.serving import Server
from tests.support.world import DataFolder


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    made.start()
    yield made
    if made.process.poll() is None:
        made.stop()


@pytest.fixture
def operator(server: Server, data_folder: DataFolder) -> Iterator[OperatorClient]:
    with OperatorClient(server.url, data_folder[1]) as client:
        yield client


@pytest.fixture
def task(operator: OperatorClient, bundle_maker: Callable[..., Path], data_folder: DataFolder, tmp_path: Path) -> str:
    bundle = operator.bundles.upload(bundle_maker(tmp_path, data_folder[2].publisher)).digest
    request = TaskRequest(name="t", population="pupils", bundle=bundle, rounds=1, min_cohort=3, cohort=5)
    return operator.tasks.create(request).task_id


@pytest.mark.sampled(every=8)
def test_a_restart_is_waited_for(server: Server, operator: OperatorClient, data_folder: DataFolder, task: str) -> None:
    environment = {**os.environ, "ARCHIPEL_TOKEN": data_folder[1]}
    watch = subprocess.Popen(
        [sys.executable, "-m", "archipel", "task", "watch", task, "--server", server.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert watch.stdout is not None
    assert watch.stderr is not None
    assert watch.stdout.readline() == "t: training over pupils, secure, 0 of 1 rounds\n"
    assert watch.stdout.readline() == "waits: no device is enrolled in population 'pupils'\n"
    server.stop()
    lost = watch.stderr.readline()
    assert lost.startswith(f"{server.url}: no answer to GET /v1/tasks/{task}/progress?rounds=10 (")
    assert lost.endswith("; trying again\n")
    server.start(int(server.url.rpartition(":")[2]))
    assert watch.stderr.readline() == "the server is back\n"
    operator.tasks.cancel(task)
    out, err = watch.communicate(timeout=20)
    assert out.startswith("cancelled: ")
    assert err == "archipel: task 't' cancelled: cancelled by the operator\n"


@pytest.mark.sampled(every=8)
def test_an_outage_is_not_waited_for_for_ever(
    server: Server, operator: OperatorClient, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archipel.operator.waiting.OUTAGE_SECONDS", 0.2)
    seen: list[bool] = []
    operator.on_outage = lambda error: seen.append(error is not None)
    with pytest.raises(UnreachableError, match="connection refused"):
        operator.tasks.wait(task, poll=0.05, on_change=lambda _: server.stop() and None)
    assert seen == [True]
    # A server that was never there is a wrong address.
    with pytest.raises(UnreachableError):
        operator.tasks.wait(task)
    assert seen == [True]


@pytest.mark.sampled(every=4)
def test_ctrl_c_leaves_the_task_running(
    server: Server, operator: OperatorClient, data_folder: DataFolder, task: str
) -> None:
    """In a terminal, which has a line that says how it stands."""
    terminal, theirs = pty.openpty()
    watch = subprocess.Popen(
        [sys.executable, "-m", "archipel", "task", "watch", task, "--server", server.url],
        stdout=subprocess.PIPE, stderr=theirs, text=True, env={**os.environ, "ARCHIPEL_TOKEN": data_folder[1]},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while b"0 of 1 rounds; no device is enrolled" not in shown:
        shown += os.read(terminal, 4096)
    watch.send_signal(signal.SIGINT)
    out, _ = watch.communicate(timeout=20)
    with suppress(OSError):  # Linux says at the end that nobody has the other side open
        while part := os.read(terminal, 4096):
            shown += part
    os.close(terminal)
    assert watch.returncode == 130
    assert f"the task goes on; `archipel task watch {task}` shows it again".encode() in shown
    assert out.splitlines()[0] == "t: training over pupils, secure, 0 of 1 rounds"
    assert operator.tasks.get(task).state == "running"
