"""Two servers' coordinators on one database and one blob store: one is killed, the other finishes its round in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from archipel.server.processes import children
from archipel.server.settings import Settings
from tests.support.devices import Device
from tests.support.world import World


class Process:
    """A coordinator as the supervisor starts it, on a data folder of its own."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        folder.mkdir()
        (folder / "server.key").write_bytes(Path(settings.path(settings.server_key)).read_bytes())
        (folder / "server.key").chmod(0o600)
        (folder / "server.toml").write_bytes((Path(settings.folder) / "server.toml").read_bytes())
        self.settings = msgspec.structs.replace(settings, folder=str(folder), blobs=str(settings.blob_folder))
        ready, told = os.pipe()
        environment = children.child_environment(self.settings) | {children.READY_FD: str(told)}
        command = [sys.executable, "-m", "archipel.server.processes.coordinator_process"]
        with open(self.settings.process_log, "ab") as log:
            self.process = subprocess.Popen(command, env=environment, pass_fds=[told], stdout=log, stderr=log)
        os.close(told)
        assert os.read(ready, 1) == b"1", self.log()
        os.close(ready)

    def log(self) -> str:
        return self.settings.process_log.read_text()

    def stop(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait(20)


def wait_for(phase: str, device: Device, seconds: float) -> float:
    started = time.monotonic()
    while device.status().phase != phase:
        assert time.monotonic() - started < seconds, device.status()
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.mark.sampled(every=8)
def test_the_other_takes_over_within_fifteen_seconds(world: World, tmp_path: Path) -> None:
    world.clock.now = time.time()  # the processes have the true clock
    task = world.create_task(cohort=3)
    devices = world.add_devices(3)
    first = Process(world.settings, tmp_path / "first")
    deadline = time.monotonic() + 10
    while "coordinating, as number 1" not in first.log():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    second = Process(world.settings, tmp_path / "second")
    try:
        for device in devices:
            device.check_in()
        deadline = time.monotonic() + 10
        while not all(device.plan is not None or device.join() for device in devices):
            assert time.monotonic() < deadline
            world.clock.now = time.time()
            time.sleep(0.05)
        for device in devices:
            device.advertising()
        wait_for("sharing", devices[0], 10)
        first.stop(signal.SIGKILL)
        for device in devices:
            device.sharing()
        taken = wait_for("complaining", devices[0], 20)
        assert taken < 15
        assert "coordinating, as number 2" in second.log()
        for phase, following in pairwise(("complaining", "masking", "confirming", "unmasking", "committed")):
            for device in devices:
                device.answer(phase)
            wait_for(following, devices[0], 10)
    finally:
        for each in (first, second):
            if each.process.poll() is None:
                each.stop(signal.SIGTERM)
    assert second.process.returncode == 0
    assert [each["phase"] for each in world.rounds(task["task_id"])] == ["committed"]
