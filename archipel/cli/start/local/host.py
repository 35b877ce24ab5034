"""A process full of devices: `python -m archipel.cli.start.local.host CONFIG.json`.

Each agent has its own key, folder, session and examples, as its device.toml says.
Every line on standard output is one event of one agent, as JSON, for the process that started this one.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.start.local.events import HostEvent, Output
from archipel.cli.start.local.threads import follow_parent, run_until_stopped
from archipel.client import Agent, Event
from archipel.client.settings import load_device_settings
from archipel.errors import ArchipelError, CommandError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode


class DeviceConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One device: its folder with device.toml, data and token, and the rounds (numbers) in which it vanishes."""

    name: str
    folder: str
    vanishes: list[int] = []


class HostConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the parent tells one host process; `server` is the server's address."""

    parent: int
    server: str
    devices: list[DeviceConfig]


class Device:
    """An agent with its examples, and a simulated battery: unplugged, the agent leaves in the middle of a round."""

    def __init__(self, config: DeviceConfig, server: str, output: Output) -> None:
        self.config = config
        self._output = output
        self._plugged_in = True
        self._number = 0
        folder = Path(config.folder)
        settings = load_device_settings(folder / "device.toml", environment={})
        if settings.examples is None or not settings.examples.file:
            raise CommandError(f"{settings.file}: [examples] needs a file = ...")
        fields = read_arrays(Path(settings.examples.file))
        if isinstance(fields, np.ndarray):
            raise CommandError(f"{settings.examples.file}: expected an .npz with an entry for each field")
        self.agent = Agent(
            # Not isolated: that would be one more process for each device. `resume_within` is short, so that a device
            # that is unplugged leaves its round for good after half a second.
            msgspec.structs.replace(settings.config, server=server, isolated=False, resume_within=0.5),
            examples=lambda: fields,
            on_event=self._on_event,
            conditions=lambda: self._plugged_in,
        )

    def run(self, stop: threading.Event) -> None:
        try:
            with self.agent:
                if not self.agent.device_id:
                    file = Path(self.config.folder) / "enrolment.token"
                    self.agent.enrol(decode("enrolment token", file.read_bytes(), EnrolmentToken))
                self._tell("enrolled", self.agent.device_id)
                self.agent.run_forever(stop)
        except (ArchipelError, OSError) as error:
            self._tell("failed", "", str(error))

    def _tell(self, event: str, device_id: str, text: str = "") -> None:
        self._output.write(HostEvent(device=self.config.name, event=event, device_id=device_id, text=text))

    def _on_event(self, event: Event) -> None:
        if event.name == "assigned":
            self._number = int(event.detail["number"])
        # The hardest moment for the others: they have masks in common with this device, whose update is masked but not
        # sent, so these masks can be removed from the sum through its key shares only.
        if event.name == "masked" and self._number in self.config.vanishes:
            self._plugged_in = False
        if event.name == "dropped":
            self._plugged_in = True
        self._output.tell(self.config.name, event, str(event.detail.get("reason", "")))


def main(path: str) -> None:
    config = msgspec.json.decode(Path(path).read_bytes(), type=HostConfig)
    follow_parent(config.parent)
    output = Output()
    try:
        devices = [Device(device, config.server, output) for device in config.devices]
    except (ArchipelError, OSError) as error:
        sys.exit(f"archipel: {error}")
    run_until_stopped([device.run for device in devices])


if __name__ == "__main__":
    main(sys.argv[1])
