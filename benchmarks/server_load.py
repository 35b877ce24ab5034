"""What the server's benchmark puts in front of it: processes, a fleet of devices, uploads and check-ins."""

from __future__ import annotations

import hashlib
import http.client
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import psutil
from sqlalchemy import insert

from archipel import bundle as b
from archipel.bundle import roles
from archipel.protocol.sealed import public_bytes
from archipel.server.data_folder import init_data_folder
from archipel.server.database.tables import CheckInRow, Device, DeviceSession
from archipel.server.http.auth import token_hash
from archipel.server.services import Services
from archipel.server.settings import Settings, load_settings

POPULATION = "fleet"
HERE = Path(__file__).resolve().parent
SERVE = (
    "import sys; from archipel.server import load_settings, supervise; supervise(load_settings(sys.argv[1], port=0))"
)
THREADS = 16


class Fleet:
    """A data folder with devices whose sessions are open already: what is measured is not enrolment."""

    def __init__(
        self,
        folder: Path,
        devices: int,
        *,
        session_end: float | None = None,
        polled_every: float | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.publisher = b.generate_key()
        self.operator_token = init_data_folder(
            folder, enrolment_key=secrets.token_bytes(32), publisher_keys=[public_bytes(self.publisher)]
        )
        self.settings: Settings = load_settings(folder, environment={}, **settings)
        self.services = Services.open(self.settings)
        self.services.prepare()
        ids = [secrets.token_hex(16) for _ in range(devices)]
        self.tokens = [secrets.token_urlsafe(32) for _ in range(devices)]
        now = time.time()
        rows = [
            {
                "device_id": each, "device_key": secrets.token_bytes(32), "token_key": secrets.token_bytes(32),
                "population": POPULATION, "kind": "device", "chain": b"{}", "enrolled": now,
            }
            for each in ids
        ]  # fmt: skip
        sessions = [
            {"token_hash": token_hash(token), "device_id": each, "expires": session_end or now + 86400}
            for each, token in zip(ids, self.tokens)
        ]
        with self.services.database.write() as session:
            session.execute(insert(Device), rows)
            session.execute(insert(DeviceSession), sessions)
            if polled_every is not None:
                session.execute(insert(CheckInRow), [_waiting(each, now, polled_every) for each in ids])

    @contextmanager
    def serving(self, workers: int = 1) -> Iterator[tuple[str, int, int]]:
        """Host, port and process id of the supervisor."""
        settings = msgspec.structs.replace(self.settings, workers=workers)
        environment = os.environ | {
            name: value for name, value in settings.environment().items() if not name.endswith("_PORT")
        }
        command = [sys.executable, "-c", SERVE, str(self.folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            yield "127.0.0.1", int(line.rsplit(":", 1)[1]), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

    def bundle(self, entries: int) -> Path:
        """A bundle whose update has so many float32; its graphs have no nodes, the server runs nothing."""
        tensors = {"w": np.zeros(entries, np.float32)}
        w: dict[str, Any] = {"dtype": "float32", "shape": (entries,), "tensor": "w"}
        update = {"kind": "delta", "weighting": "uniform", "range": 4.0, "bits": 16, "clip": 2.0}
        finish = b.Program(
            kind="finish",
            file="finish.onnx",
            inputs=(roles.Start(name="w.start", **w), roles.Parameter(name="w", **w)),
            outputs=(roles.Update(name="w.update", **w, **update),),
        )
        name = f"load-{entries}"
        b.write_bundle(
            self.folder / name,
            name=name,
            programs={"finish": finish},
            graphs={"finish.onnx": b"\x08\x0a\x3a\x00\x42\x02\x10\x15"},  # IR 10, opset 21, no nodes
            weights=b.write_weights(tensors),
            parameters=b.parameter_specs(tensors, ["w"]),
            limits=b.Limits(peak_bytes=1, flops_per_example=1, upload_bytes=4 * entries),
            privacy=b.PrivacyPolicy(
                modes=("secure", "plain"),
                protocols=("complete", "neighbours"),
                min_cohort=2,
                threshold=0.51,
                max_clip=2.0,
                max_bits=16,
                colluders=0.0,
            ),
            key=self.publisher,
            strategy="fedavg",
        )
        b.pack(self.folder / name, self.folder / f"{name}.bundle")
        return self.folder / f"{name}.bundle"


def _waiting(device_id: str, now: float, every: float) -> dict[str, Any]:
    """The row of a device that comes so often, and came at some time within that."""
    seen = now - random.uniform(0, every)
    return {
        "device_id": device_id, "population": POPULATION, "last_seen": seen, "due": seen + every, "attributes": {},
        "versions": None,
    }  # fmt: skip


@contextmanager
def bare(
    folder: Path, app: str = "bare_flask:app", workers: int = 1, threads: int = THREADS
) -> Iterator[tuple[str, int, int]]:
    """A bare application under the same gunicorn: host, port, process id."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "gunicorn", "--chdir", str(HERE / "peers"), "-k", "gthread", "-w", str(workers),
        "--threads", str(threads), "--keep-alive", "75", "--worker-connections", "4000", "--log-level", "warning", "-b",
        f"127.0.0.1:{port}", app,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | {"BARE_FOLDER": str(folder)})
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield "127.0.0.1", port, process.pid
    finally:
        process.terminate()
        process.wait(30)


def upload(host: str, port: int, requests: Sequence[tuple[str, dict[str, str]]], body: bytes, at_once: int) -> float:
    """PUT `body` to every path with its headers, `at_once` connections at a time; seconds until the last answer."""
    queue: SimpleQueue[tuple[str, dict[str, str]] | None] = SimpleQueue()
    for request in requests:
        queue.put(request)
    errors: list[str] = []
    digest = hashlib.sha256(body).hexdigest()

    def work() -> None:
        line = http.client.HTTPConnection(host, port, timeout=300)
        while (request := queue.get()) is not None:
            headers = {"Content-Type": "application/octet-stream", "Digest-SHA256": digest, **request[1]}
            line.request("PUT", request[0], body, headers)
            answer = line.getresponse()
            text = answer.read()
            if answer.status != 200:
                errors.append(f"{answer.status} {text[:200]!r}")
        line.close()

    threads = [threading.Thread(target=work) for _ in range(min(at_once, len(requests)))]
    for _ in threads:
        queue.put(None)
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    if errors:
        raise RuntimeError(f"{len(errors)} uploads failed, one of them: {errors[0]}")
    return seconds


def check_in(host: str, port: int, tokens: Sequence[str]) -> list[bytes]:
    """One check-in of each device, one after the other; the bodies of the answers."""
    line = http.client.HTTPConnection(host, port, timeout=60)
    answers = []
    for token in tokens:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        line.request("POST", "/v1/check-ins", b"{}", headers)
        answers.append(line.getresponse().read())
    line.close()
    return answers


def memory(pid: int) -> float:
    """MiB of a process and all its descendants; what they share is counted once (PSS)."""
    return float(sum(each.memory_full_info().pss for each in family(pid))) / 2**20


def processor(pid: int) -> float:
    """Seconds of processor time that a process and all its descendants have taken so far."""
    return float(sum(sum(each.cpu_times()[:2]) for each in family(pid)))


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants."""
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
