"""The real thing: supervisor, gunicorn and coordinator as processes, devices over TCP, signals."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import urllib3

from archipel.bundle import load_public_key
from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.operator import OperatorClient
from archipel.protocol import messages
from archipel.protocol.operator.tasks import TaskRequest
from archipel.server.settings import load_settings
from tests.support.devices import Device
from tests.support.patience import stretched
from tests.support.serving import SERVE, Server
from tests.support.world import DataFolder


def wait_until(what: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + stretched(seconds)
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def server(data_folder: DataFolder) -> Iterator[Server]:
    made = Server(data_folder[0])
    yield made
    if made.alive:
        made.stop(signal.SIGKILL)
        wait_until(lambda: not made.children())


@pytest.fixture
def operator(server: Server, data_folder: DataFolder) -> Iterator[OperatorClient]:
    with OperatorClient(server.start(), data_folder[1]) as client:
        yield client


@pytest.fixture
def fleet(
    server: Server, operator: OperatorClient, data_folder: DataFolder, device_maker: type[Device]
) -> list[Device]:
    pool = urllib3.PoolManager(maxsize=16, retries=urllib3.Retry(5, backoff_factor=0.1, allowed_methods=None))

    def transport(method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        response = pool.request(method, server.url + path, body=body, headers=headers)
        return response.status, response.data

    devices = [
        device_maker(transport, data_folder[2], operator.server.info().server_key, not_after=2e9) for _ in range(5)
    ]
    for device in devices:
        device.enrol().open_session()
    return devices


def take_part(device: Device, rounds: int, vanish_in: str = "") -> None:
    """What a device does, in a thread of its own."""
    for _ in range(rounds):
        wait_until(device.join)
        for phase in ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking"):
            wait_until(lambda phase=phase: device.status().phase == phase)
            if phase == vanish_in:
                return
            device.answer(phase)
        wait_until(lambda: device.status().phase == "committed")


def in_threads(work: list[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=job) for job in work]
    for thread in threads:
        thread.start()
    return threads


def task_request(digest: str, **settings: Any) -> TaskRequest:
    values = {"rounds": 2, "min_cohort": 3, "cohort": 5, "threshold": 3, **settings}
    return TaskRequest(name="digits", population="pupils", bundle=digest, **values)


@pytest.mark.sampled(every=3)
def test_two_rounds_over_tcp_while_processes_are_killed(
    server: Server,
    operator: OperatorClient,
    fleet: list[Device],
    bundle_maker: Callable[..., Path],
    data_folder: DataFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = operator.bundles.upload(bundle_maker(tmp_path, data_folder[2].publisher))
    assert operator.bundles.upload(tmp_path / "tiny.bundle") == info
    assert operator.bundles.download(info.digest) == (tmp_path / "tiny.bundle").read_bytes()
    task = operator.tasks.create(task_request(info.digest))
    for number, device in enumerate(fleet, start=1):
        device.vector = np.full(9, 256 * number, np.uint32)
        device.vector[8] = 4096
    threads = in_threads([lambda device=device: take_part(device, 2) for device in fleet])
    before = server.children()
    assert set(before) == {"coordinator", "gunicorn", "worker"}
    wait_until(lambda: operator.tasks.get(task.task_id).rounds_committed == 1)
    os.kill(before["coordinator"], signal.SIGKILL)
    os.kill(before["worker"], signal.SIGKILL)
    seen = []
    done = operator.tasks.wait(task.task_id, timeout=stretched(20), poll=0.05, on_change=seen.append)
    for thread in threads:
        thread.join()
    assert (done.state, done.rounds_committed) == ("completed", 2)
    assert seen[-1] == done
    after = server.children()
    assert set(after) == set(before)
    assert after["coordinator"] != before["coordinator"]
    assert after["worker"] != before["worker"]
    assert done.model is not None
    np.testing.assert_array_equal(operator.weights.read(done.model)["w"], np.full((3, 2), 6.0, np.float32))
    monkeypatch.setattr("archipel.operator.connection.PAGE", 1)
    first, second = operator.tasks.rounds(task.task_id)
    assert (first.number, second.number) == (1, 2)
    assert second.weights_in == first.weights_out
    assert second.weights_out == done.model
    assert operator.rounds.status(second.round_id).phase == "committed"
    assert [known.task_id for known in operator.tasks.list()] == [task.task_id]
    operator.close()
    assert server.stop() == 0
    assert server.children() == {}


@pytest.mark.sampled(every=3)
def test_what_is_acknowledged_survives_kill_minus_9(
    server: Server,
    operator: OperatorClient,
    fleet: list[Device],
    bundle_maker: Callable[..., Path],
    data_folder: DataFolder,
    tmp_path: Path,
) -> None:
    info = operator.bundles.upload(bundle_maker(tmp_path, data_folder[2].publisher))
    operator.tasks.create(task_request(info.digest, rounds=1))
    threads = in_threads([lambda device=device: take_part(device, 1, vanish_in="masking") for device in fleet])
    for thread in threads:
        thread.join()
    children = server.children()
    fleet[0].masking()
    # The answer has just arrived: everything dies.
    for pid in children.values():
        os.kill(pid, signal.SIGKILL)
    server.stop(signal.SIGKILL)
    (spooled,) = (server.folder / "blobs" / "updates").rglob(f"{fleet[0].id}.*")
    assert spooled.read_bytes() == fleet[0].masked
    with sqlite3.connect(f"file:{server.folder}/archipel.db?mode=ro", uri=True) as database:
        rows = database.execute("SELECT device_id, digest FROM answers WHERE phase = 'masking'").fetchall()
    database.close()
    assert rows == [(fleet[0].id, spooled.name.split(".")[1])]
    wait_until(lambda: not server.children())
    # Started again, on another port, the round goes on.
    server.start()
    for device in fleet[1:]:
        device.masking()
    wait_until(lambda: fleet[0].status().phase == "confirming")
    survivors = fleet[0].ask("GET", f"{fleet[0].round}/survivors", messages.Survivors).devices
    assert survivors == sorted(device.id for device in fleet)


def refused(folder: Path, port: int) -> str:
    """The one line with which the server does not start."""
    command = [sys.executable, "-c", SERVE, str(folder), str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.sampled(every=8)
def test_what_cannot_start_says_why_in_one_line_and_what_is_killed_leaves_no_process(
    server: Server, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        assert refused(server.folder, port) == (
            f"Error: 127.0.0.1 port {port}: in use by another program; choose another with --port"
        )
    assert "archipel serve init" in refused(tmp_path, 0)
    public = server.folder / "server.key.pub"
    public.unlink()
    (server.folder / "server.key").chmod(0o604)
    assert "run: chmod 600 " in refused(server.folder, 0)
    (server.folder / "server.key").chmod(0o600)
    server.start()
    with OperatorClient(server.url, "wrong") as stranger, pytest.raises(RefusedError):
        next(stranger.tasks.list())
    for name in ("archipel.db", "server.log", "requests.log"):
        assert (server.folder / name).stat().st_mode & 0o077 == 0, name
    assert load_public_key(public) == load_settings(server.folder, environment={}).public_key
    assert "another server is running on this data folder" in refused(server.folder, 0)
    # A killed supervisor takes its children with it.
    assert set(server.children()) == {"coordinator", "gunicorn", "worker"}
    server.stop(signal.SIGKILL)
    wait_until(lambda: not server.children())
    (server.folder / "archipel.db").write_bytes(b"not a database" * 1000)
    for leftover in server.folder.glob("archipel.db-*"):
        leftover.unlink()
    assert "file is not a database" in refused(server.folder, 0)
    (server.folder / "server.key").unlink()
    assert "server.key" in refused(server.folder, 0)


@pytest.mark.sampled(every=4)
def test_the_operators_client_says_what_went_wrong_and_ctrl_c_stops_everything(
    server: Server, operator: OperatorClient, data_folder: DataFolder, tmp_path: Path
) -> None:
    assert operator.server.health().status == "ok"
    settings = load_settings(data_folder[0], environment={})
    assert operator.server.info().server_key == settings.public_key
    with pytest.raises(RefusedError) as refusal:
        operator.tasks.get("0" * 32)
    assert (refusal.value.status, refusal.value.kind) == (404, "not_found")
    with OperatorClient(server.url, "wrong") as stranger, pytest.raises(RefusedError) as refusal:
        next(stranger.tasks.list())
    assert (refusal.value.status, refusal.value.kind) == (401, "unauthorized")
    (tmp_path / "junk.bundle").write_bytes(b"junk")
    with pytest.raises(RefusedError, match="not a bundle that this server accepts: "):
        operator.bundles.upload(tmp_path / "junk.bundle")
    with pytest.raises(ClientError, match="cannot be read"):
        operator.bundles.upload(tmp_path / "missing.bundle")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with OperatorClient(f"http://127.0.0.1:{port}", "x", timeout=2) as nobody:
        with pytest.raises(UnreachableError, match="no answer to POST"):
            nobody.tasks.cancel("0" * 32)
        with pytest.raises(UnreachableError, match="no answer to GET"):
            next(nobody.tasks.list())
    # A body that is too large is refused before it is sent.
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/challenges HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 1000
        )
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert msgspec.json.decode(body, type=messages.Problem).status == 413
    # Ctrl-C stops everything.
    operator.close()
    assert server.stop(signal.SIGINT) == 0
    assert server.children() == {}


@pytest.mark.sampled(every=8)
def test_log_files_of_a_bounded_size(server: Server, data_folder: DataFolder) -> None:
    """Three web processes on one file: every request is in one of them, once."""
    url = server.start(workers="3", log_bytes="3000", logs_kept="500")
    pool = urllib3.PoolManager(maxsize=8)
    answered: list[str] = []

    def ask() -> None:
        for _ in range(50):
            answered.append(pool.request("GET", f"{url}/v1/server").headers["X-Request-Id"])

    for thread in in_threads([ask] * 6):
        thread.join(60)
    server.stop()
    files = sorted(server.folder.glob("requests.log*"))
    logged = [msgspec.json.decode(line)["request_id"] for file in files for line in file.read_bytes().splitlines()]
    assert len(answered) == 300
    assert sorted(logged) == sorted(answered)
    assert all(file.stat().st_size < 4500 for file in files)


@pytest.mark.parametrize("victim", ["coordinator", "gunicorn"])
@pytest.mark.sampled(every=4)
def test_a_child_that_was_killed_is_told_of(server: Server, victim: str) -> None:
    server.start()
    before = server.children()[victim]
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: server.children().get(victim, before) != before)
    name = {"gunicorn": "web"}.get(victim, victim)
    said = f"the {name} process was killed by SIGKILL; starting it again in 0.5 s"
    assert server.process.stderr.readline() == f"{said}\n"
    lines = (server.folder / "server.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines if said in line] == [f"archipel.supervisor: {said}"]
