"""A model with versions, a rollout of one of them, and devices that evaluate what they are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from archipel.bundle import decode_manifest
from archipel.protocol.messages import RoundPlan
from archipel.protocol.sealed import unseal
from archipel.protocol.uploads import metric_arrays, upload_layout
from archipel.server.database.registry_tables import Rollout
from archipel.server.database.tables import BundleRow
from archipel.server.devices.targeting import place
from tests.support.devices import POPULATION, Device
from tests.support.tiny_bundle import make_bundle
from tests.support.world import World

MODEL = "digits"
GATE: dict[str, Any] = {
    "metric": "accuracy", "range": 1.0, "better": "higher", "max_loss": 0.05, "privacy": "plain", "min_devices": 3,
    "max_devices": 3, "seconds": 600.0,
}  # fmt: skip
STAGES = [{"percent": 50, "soak_seconds": 60}, {"percent": 100, "soak_seconds": 30}]
EXAMPLES = 40


class Fleet:
    """`bundles` are the digests of the versions, from version 1 on."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bundles: list[str] = []
        self.told: set[tuple[str, str]] = set()

    def post(
        self, path: str, body: object = None, status: int = 200, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any]
        code, answer = self.world.operator("POST", f"/v1/{path}", body, headers)
        assert code == status, answer
        return answer

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any]
        code, answer = self.world.operator("GET", f"/v1/{path}")
        assert code == 200, answer
        return answer

    def create(self, versions: int = 2, *, promote: int | None = 1) -> Fleet:
        """The model with so many versions, each a bundle of its own."""
        self.post("models", {"name": MODEL, "population": POPULATION}, 201)
        for _ in range(versions):
            self.add_version()
        if promote is not None:
            self.promote(promote)
        return self

    def add_version(self, *, not_after: int = 0) -> dict[str, Any]:
        name = f"tiny{len(self.bundles) + 1}"
        file = make_bundle(self.world.settings.path("."), self.world.keys.publisher, name=name, not_after=not_after)
        status, answer = self.world.operator("POST", "/v1/bundles", file.read_bytes())
        assert status == 201, answer
        self.bundles.append(answer["digest"])
        return self.post(f"models/{MODEL}/versions", {"bundle": answer["digest"]}, 201)

    def promote(self, number: int) -> dict[str, Any]:
        return self.post(f"models/{MODEL}/promote", {"version": number})

    def model(self) -> dict[str, Any]:
        return self.get(f"models/{MODEL}")

    def begin(self, *, gate: dict[str, Any] | Literal["none"] | None = None, **settings: Any) -> dict[str, Any]:
        """A rollout of version 2; `gate` changes the usual one."""
        asked = gate if isinstance(gate, str) else {**GATE, **(gate or {})}
        return self.post("rollouts", {"model": MODEL, "version": 2, "stages": STAGES, "gate": asked, **settings}, 201)

    def show(self, rollout: dict[str, Any]) -> dict[str, Any]:
        return self.get(f"rollouts/{rollout['rollout_id']}")

    def place(self, rollout: dict[str, Any], device: Device) -> float:
        with self.world.services.database.read() as session:
            return place(session.get_one(Rollout, rollout["rollout_id"]).salt, device.id)

    def enrol(
        self, rollout: dict[str, Any], inside: int, outside: int = 0, percent: float = 50.0
    ) -> tuple[list[Device], list[Device]]:
        """So many new devices whose place is below `percent`, and so many others. The rest never comes again."""
        found: tuple[list[Device], list[Device]] = ([], [])
        while len(found[0]) < inside or len(found[1]) < outside:
            (device,) = self.world.add_devices(1)
            device.versions = {}
            found[self.place(rollout, device) >= percent].append(device)
        return found[0][:inside], found[1][:outside]

    def serve(self, devices: Sequence[Device], accuracy: Mapping[str, float], *, passes: int = 20) -> None:
        """Devices check in and upload what they find for the bundle that they are sent, until nothing is left to do."""
        idle = 0
        for _ in range(passes):
            busy = [device for device in devices if self._take_part(device, accuracy)]
            self.world.settle()
            idle = 0 if busy else idle + 1
            if idle == 2:  # one to say that they wait, one to be sent something
                return

    def _take_part(self, device: Device, accuracy: Mapping[str, float]) -> bool:
        sealed = device.check_in()
        if sealed is None:
            return False
        round_id = unseal("plan", sealed, device.server_key, RoundPlan).round_id
        if (device.id, round_id) in self.told:
            device.answer(device.status().phase)
            return True
        assert device.join()
        self.told.add((device.id, round_id))
        assert device.plan is not None
        arrays = self.arrays(device, accuracy[device.plan.bundle])
        if device.plan.privacy == "plain":
            device.updating(**arrays)
            return True
        with self.world.services.database.read() as session:
            manifest = decode_manifest(session.get_one(BundleRow, device.plan.bundle).manifest)
        layout = upload_layout(manifest, device.plan.kind, device.plan.program, device.plan.metrics)
        values = {name: np.asarray(array, np.float32) for name, array in arrays.items()}
        bits, most = device.plan.modulus_bits, device.plan.max_cohort
        device.vector = layout.encode(values, modulus_bits=bits, max_cohort=most)
        device.advertising()
        return True

    @staticmethod
    def arrays(device: Device, value: float) -> dict[str, np.ndarray]:
        """What a device uploads that has found this on its examples, for each metric that it is asked for."""
        plan = device.plan
        assert plan is not None
        return metric_arrays(dict.fromkeys(plan.metrics, value), plan.metrics, EXAMPLES, plan.max_examples)

    def pass_stage(
        self,
        rollout: dict[str, Any],
        devices: Sequence[Device],
        new: float,
        old: float,
        *,
        after_first: list[Device] | None = None,
    ) -> dict[str, Any]:
        """Let the stage soak, and its devices find these accuracies of version 2 and version 1.

        With `after_first` one device, which is put there, is gone once it has evaluated version 2.
        """
        self.world.clock.now = self.show(rollout)["state_ends"]
        self.reopen(devices)
        self.world.settle()
        accuracy = {self.bundles[1]: new, self.bundles[0]: old}
        if after_first is not None:
            while not self._heard(rollout):
                self.serve(devices, accuracy, passes=1)
            (first,) = self.world.rounds(self._heard(rollout))
            after_first += [each for each in devices if each.id == first["survivors"][0]]
            devices = [each for each in devices if each not in after_first]
            self.serve(devices, accuracy)
            self.world.clock.now += 61  # the others are not waited for longer
            self.reopen(devices)
        self.serve(devices, accuracy)
        return self.show(rollout)

    def _heard(self, rollout: dict[str, Any]) -> str:
        """The candidate's task, once it has a result."""
        shown = self.show(rollout)
        task = shown["stages"][shown["stage"] - 1]["candidate"]["task_id"]
        return str(task) if self.world.task(task)["state"] == "completed" else ""

    def reopen(self, devices: Sequence[Device]) -> None:
        """Sessions last 15 minutes."""
        for device in devices:
            device.open_session()
