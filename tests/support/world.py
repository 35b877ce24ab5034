"""A server on a real data folder in this process, a clock that tests turn, and its devices."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from flask import Flask

from archipel.protocol.sealed import public_bytes
from archipel.server.app import create_app
from archipel.server.data_folder import init_data_folder
from archipel.server.processes.coordinator import Coordinator
from archipel.server.services import Services
from archipel.server.settings import Settings, load_settings
from tests.support.devices import ANSWERED, POPULATION, START, Device, Keys

DataFolder = tuple[Path, str, Keys]
"""An initialised one, its operator token, the offline keys."""


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """One server in this process: the web application, a coordinator to step by hand, and its devices."""

    settings: Settings
    operator_token: str
    keys: Keys
    clock: Clock
    services: Services
    bundle_file: Path
    app: Flask
    coordinator: Coordinator
    devices: list[Device] = field(default_factory=list)

    def transport(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        # Without this Werkzeug leaves out the length of an empty body, which clients send.
        length = {} if body is None else {"CONTENT_LENGTH": str(len(body))}
        with (
            self.app.test_client() as client,
            client.open(path, method=method, data=body, headers=headers, environ_overrides=length) as response,
        ):
            return response.status_code, response.get_data()

    def operator(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        extra = {"Authorization": f"Bearer {self.operator_token}", **(headers or {})}
        status, answer = self.transport(method, path, data, extra)
        return status, msgspec.json.decode(answer) if answer[:1] in (b"{", b"[") else answer

    def restart_coordinator(self) -> None:
        """As after kill -9: nothing of the old one's memory is there."""
        if self.coordinator._services is not self.services:
            self.coordinator._services.database.dispose()  # the system closes what a killed process held
        self.coordinator = Coordinator(Services.open(self.settings, clock=self.clock))
        self.coordinator.recover()

    def add_devices(self, count: int) -> list[Device]:
        added = [Device(self.transport, self.keys, self.settings.public_key) for _ in range(count)]
        for device in added:
            device.enrol().open_session()
        self.devices += added
        return added

    def publish(self) -> str:
        status, answer = self.operator("POST", "/v1/bundles", self.bundle_file.read_bytes())
        assert status in (200, 201), answer
        return str(answer["digest"])

    def create_task(self, **settings: Any) -> dict[str, Any]:
        values = {
            "name": "digits", "population": POPULATION, "rounds": 1, "min_cohort": 3, "cohort": 5, "threshold": 3,
            **settings,
        }  # fmt: skip
        values.setdefault("bundle", self.publish())
        answer: dict[str, Any]
        status, answer = self.operator("POST", "/v1/tasks", values)
        assert status == 201, answer
        return answer

    def stored(self, folder: str) -> dict[str, bytes]:
        """All files below `folder`, half-written ones too, by their path."""
        root = self.settings.blob_folder / folder
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def damage(self, key: str) -> None:
        """Replace a stored file's bytes by as many zeros."""
        path = self.settings.blob_folder / key
        path.write_bytes(bytes(path.stat().st_size))

    def task(self, task_id: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.operator("GET", f"/v1/tasks/{task_id}")[1]
        return shown

    def rounds(self, task_id: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.operator("GET", f"/v1/tasks/{task_id}/rounds?limit=500")[1]["items"]
        # The clock may have stood still, and then the server's order is that of their ids.
        return sorted(found, key=lambda row: (row["started"], row["number"]))

    def settle(self, steps: int = 50) -> None:
        """Let the coordinator do everything that is due now."""
        for _ in range(steps):
            if not self.coordinator.step():
                return
        raise AssertionError("the coordinator does not come to rest")

    def start_round(self, devices: Sequence[Device]) -> None:
        """Devices check in, a round opens, and all of them join it (phase advertising)."""
        for device in devices:
            assert device.check_in() is None
        self.settle()
        assert all(device.join() for device in devices)

    def start_round_at_deadline(self, devices: Sequence[Device]) -> None:
        """The same with fewer devices than the cohort: the round goes on without the rest at its deadline."""
        for device in devices:
            device.check_in()
        self.settle()
        self.clock.now += 61
        for device in devices:
            device.check_in()
        self.settle()
        assert all(device.join() for device in devices)

    def run_to(self, phase: str, devices: Sequence[Device]) -> None:
        """Take a started round through all phases before `phase`."""
        for name in ANSWERED:
            if name == phase:
                break
            for device in devices:
                device.answer(name)
            self.settle()
        if devices[0].status().phase != phase:
            raise AssertionError(f"the round is in phase {devices[0].status()}, expected {phase}")


@contextmanager
def temporary_folder(keys: Keys) -> Iterator[DataFolder]:
    """In memory where there is such a folder: most of a round's time is waiting for the disk to sync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="archipel-test-") as root:
        token = init_data_folder(
            Path(root) / "server",
            enrolment_key=public_bytes(keys.enrolment),
            publisher_keys=[public_bytes(keys.publisher)],
        )
        yield Path(root) / "server", token, keys


NO_LIMITS = {"requests_per_second": 1e6, "anonymous_per_second": 1e6}
"""For tests that send whatever they can."""


def open_world(
    folder: Path, token: str, keys: Keys, bundle_file: Path, empty_database: Path, **changes: object
) -> World:
    """On an initialised data folder."""
    shutil.copy(empty_database, folder / "archipel.db")
    # Tests have a handful of devices; those of the smallest answer itself say what it is.
    settings = load_settings(folder, environment={}, **{"smallest_answer": 1, **changes})
    clock = Clock()
    services = Services.open(settings, clock=clock)
    services.prepare()
    return World(
        settings=settings,
        operator_token=token,
        keys=keys,
        clock=clock,
        services=services,
        bundle_file=bundle_file,
        app=create_app(settings, clock=clock),
        coordinator=Coordinator(services),
    )


def close_world(world: World) -> None:
    world.app.extensions["archipel.live"].close()
    for services in (world.services, world.app.extensions["archipel"], world.coordinator._services):
        services.database.dispose()
