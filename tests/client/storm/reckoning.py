"""What must be true after a storm, computed again from the agents' own data by the runtime: no server, no masks."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from sqlalchemy import select

from archipel.bundle import open_bundle
from archipel.client import Entry
from archipel.client.memory.journal import KEPT_ROUNDS
from archipel.lite_runtime import Runtime
from archipel.protocol.messages import RoundPlan
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import Sealed, decode
from archipel.protocol.vector import Layout
from archipel.server.database.tables import UPDATE_PHASES, Answer, Round, Task, Version
from archipel.server.services import Services
from tests.support.faults import Proxy
from tests.support.federation import round_seed, states
from tests.support.linear_bundle import local_data

STEPS_PER_EPOCH = 4
"""Examples in a batch of the bundle's schedule, which has two epochs."""


@dataclass
class Reckoning:
    """`numbers` are those of the agents by device id, `journals` what each of them did."""

    services: Services
    bundle: Path
    publisher: bytes
    folders: dict[str, Path]
    numbers: dict[str, int]
    journals: dict[str, list[Entry]]

    def __post_init__(self) -> None:
        self.runtime = Runtime(open_bundle(self.bundle, [self.publisher]))
        self.layout = Layout.of(self.runtime.bundle.program("finish"))
        with self.services.database.read() as session:
            self.rounds = {each.round_id: each for each in session.scalars(select(Round))}
            self.tasks = {each.task_id: each for each in session.scalars(select(Task))}
            self.versions = {each.round_id: each for each in session.scalars(select(Version))}
            self.updates = list(session.scalars(select(Answer).where(Answer.phase.in_(UPDATE_PHASES))))
            session.expunge_all()
        self.weights = cache(lambda digest: self.services.blobs.read_weights(digest)["w"])

    @property
    def committed(self) -> list[Round]:
        return [each for each in self.rounds.values() if each.phase == "committed"]

    def check_sums(self) -> None:
        """Every version and every evaluation is the mean over exactly the devices that the server names."""
        for each in self.committed:
            buffered = self.tasks[each.task_id].buffered
            survivors = [
                update
                for update in self.updates
                if (update.folded_into if buffered else update.round_id) == each.round_id
            ]
            assert len(survivors) >= 3, (each.round_id, len(survivors))
            if self.tasks[each.task_id].kind == "training":
                version = self.versions[each.round_id]
                expected = self._mean(each, self.weights(version.parent), survivors)
                np.testing.assert_allclose(self.weights(version.weights), expected, rtol=1e-5, atol=1e-6)
            else:
                errors = [self._errors(each, update.device_id) for update in survivors]
                found = each.result
                assert found["devices"] == len(survivors)
                np.testing.assert_allclose(found["metrics"]["mse"], np.mean(np.concatenate(errors) ** 2), rtol=1e-2)

    def check_uploads(self, proxy: Proxy) -> None:
        """No device sent two different things for one step of a round, and the server has what the journal says."""
        sent, sizes = defaultdict(set), defaultdict(list)
        for method, path, body in proxy.came:
            if method == "PUT" and "/rounds/" in path:
                sent[path].add(hashlib.sha256(body).hexdigest())
                sizes[path].append(len(body))
        assert sent
        twice = {path: sizes[path] for path, digests in sent.items() if len(digests) > 1}
        assert not twice, twice
        entries = {(entry.round_id, device): entry for device, journal in self.journals.items() for entry in journal}
        for update in self.updates:
            entry = entries.get((update.round_id, update.device_id))
            if entry is None:
                assert len(self.journals[update.device_id]) >= KEPT_ROUNDS, "an upload without a journal entry"
            else:
                assert entry.masked == update.digest, (entry, update.digest)
        for (round_id, device), entry in entries.items():
            path = f"/agent-{self.numbers[device]}/v1/rounds/{round_id}/update"
            assert sent[path] <= {entry.masked}, entry

    def check_journals(self) -> None:
        """All is settled, and who thinks that its update counted is right."""
        counted = {(update.round_id, update.device_id) for update in self.updates}
        for device, journal in self.journals.items():
            for entry in journal:
                assert entry.step == "closed", entry
                # A plan whose files came garbled is one that cannot be carried out; nothing was sent for it.
                assert entry.result in ("took_part", "dropped") or (entry.result == "refused" and not entry.masked)
                if entry.result == "took_part":
                    assert (entry.round_id, device) in counted, f"{entry}: a device thinks that it counts and does not"
                    phase = self.rounds[entry.round_id].phase
                    assert entry.buffered or phase == "committed", (entry, phase)

    def check_states(self) -> None:
        """Steps that the state on each device has counted are those of the rounds that it knows counted."""
        for device, journal in self.journals.items():
            if len(journal) >= KEPT_ROUNDS:
                continue
            steps = 2 * -(-len(local_data(self.numbers[device])["y"]) // STEPS_PER_EPOCH)
            taken = [
                entry
                for entry in journal
                if entry.result == "took_part" and self.tasks[entry.task_id].kind == "training"
            ]
            assert seen(self.folders[device]) == steps * len(taken), (self.numbers[device], journal)

    def _plan(self, round_id: str) -> tuple[RoundPlan, str]:
        sealed = decode("plan", self.rounds[round_id].plan, Sealed)
        return decode("plan", sealed.body, RoundPlan), plan_digest(sealed)

    def _mean(self, current: Round, parent: np.ndarray, updates: list[Answer]) -> np.ndarray:
        total, weight = np.zeros(3), 0.0
        task = self.tasks[current.task_id]
        for update in updates:
            plan, digest = self._plan(update.round_id)
            arrays = self.runtime.local_round(
                local_data(self.numbers[update.device_id]),
                seed=round_seed(self.folders[update.device_id], digest),
                parameters={"w": self.weights(plan.weights)},
            ).arrays
            if plan.privacy == "secure":
                vector = self.layout.encode(arrays, modulus_bits=plan.modulus_bits, max_cohort=plan.max_cohort)
                one = self.layout.decode_sum(vector, cohort=1, modulus_bits=plan.modulus_bits)
                delta, part = one.deltas["w"], one.weight or 0.0
            else:
                late = max(current.number - plan.number, 0) if task.buffered else 0
                delta = arrays["dw"].astype(np.float64) * (1 + late) ** -0.5
                part = float(arrays["weight"])
            total += delta
            weight += part
        # A step far beyond the usual ones of its task is scaled down, which the server records.
        assert current.step_scale == 1.0 or "scaled down" in current.reason, current.round_id
        return parent + current.step_scale * total / weight

    def _errors(self, current: Round, device: str) -> np.ndarray:
        data = local_data(self.numbers[device])
        return data["x"] @ self.weights(current.weights_in) - data["y"]


def seen(folder: Path) -> float:
    """What the device's own state has counted; 0 before there is one."""
    return sum(float(each.state["seen"]) for each in states(folder))


def journal(folder: Path) -> list[Entry]:
    """The entries as they are on disk now, whoever is writing them."""
    found = []
    for path in (folder / "rounds").glob("*.json"):
        try:
            found.append(decode("entry", path.read_bytes(), Entry))
        except FileNotFoundError:
            continue  # forgotten just now
    return sorted(found, key=lambda entry: entry.started)
