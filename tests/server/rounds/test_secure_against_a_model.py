"""Secure rounds under any order of messages, repeats, delays and restarts: phases, answers and sums are a model's.

The model is the protocol in a few lines: who may send and read what in which phase, when a phase is over, and what the
sum of a committed round must be.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from archipel.bundle import read_weights
from archipel.protocol.messages import Cohort, EncryptedShare, LeaveRequest, RoundPlan, Shares
from archipel.protocol.policy import plan_digest
from archipel.protocol.sealed import public_bytes, unseal
from archipel.protocol.secagg import Participant
from archipel.protocol.secagg.envelope import sign_envelope
from tests.server.rounds.machine import run_machine
from tests.support.devices import Device, Keys
from tests.support.tiny_bundle import DELTA_STEP, WEIGHT_STEP
from tests.support.world import close_world, open_world, temporary_folder

Request = tuple[str, str, bytes | None, dict[str, str]]
"""What a device's transport is called with: method, path, body, headers."""

DEVICES, COHORT, MIN_COHORT, THRESHOLD, SECONDS = 5, 4, 3, 3, 20
PHASES = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
READ = {
    "cohort": "sharing",
    "shares": "complaining",
    "complaints": "masking",
    "survivors": "confirming",
    "confirmations": "unmasking",
}
BEFORE = dict(zip(PHASES[1:], PHASES))


@dataclass
class Modelled:
    """A round as it should be. `answered` maps phases to devices, `sent` (phase, device) to the accepted request."""

    members: set[str]
    began: float
    goal: int | None
    synchronous: bool
    phase: str = "advertising"
    answered: dict[str, set[str]] = field(default_factory=lambda: {phase: set() for phase in PHASES})
    updates: dict[str, np.ndarray] = field(default_factory=dict)
    sent: dict[tuple[str, str], Request] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    spoilers: set[str] = field(default_factory=set)
    excluded: set[str] = field(default_factory=set)

    def reached(self, phase: str) -> set[str]:
        return self.members if phase == "advertising" else self.answered[BEFORE[phase]]

    def asked(self, phase: str) -> set[str]:
        excluded = self.excluded if phase == "masking" else set()
        return self.reached(phase) - (self.left - self.answered[phase]) - excluded

    def sending(self, phase: str, device: str) -> int:
        """The status of a first message."""
        return (
            410
            if device in self.left | self.excluded
            else self._status(phase, device, self.asked(phase), too_late=PHASES.index(phase) < self._place)
        )

    def reading(self, phase: str, device: str) -> int:
        """One that has left may still read what was sent to it."""
        return 410 if device in self.excluded else self._status(phase, device, self.reached(phase), too_late=False)

    @property
    def _place(self) -> int:
        return PHASES.index(self.phase) if self.phase in PHASES else len(PHASES)

    def _status(self, phase: str, device: str, allowed: set[str], *, too_late: bool) -> int:
        if self.phase not in PHASES or too_late:
            return 410
        if PHASES.index(phase) > self._place:
            return 409
        return 200 if device in allowed else 410

    def has_part(self, device: str) -> bool:
        if device in self.left | self.excluded:
            return False
        done = self.phase == "unmasking" and device in self.answered["unmasking"]
        return self.phase == "advertising" or (self.phase in PHASES and device in self.asked(self.phase) and not done)

    def settle(self, now: float) -> None:
        while self.phase in PHASES:
            asked, answered = len(self.asked(self.phase)), len(self.answered[self.phase])
            needed = max(THRESHOLD, MIN_COHORT)
            if self.synchronous and self.phase in ("advertising", "sharing", "complaining", "masking"):
                needed = self.goal or COHORT
            if self.phase == "unmasking":
                needed = THRESHOLD
            if asked < needed:
                self.phase = "failed"
                return
            late = now >= self.began + SECONDS
            enough = self.phase == "masking" and self.goal is not None and answered >= self.goal
            if not (late or answered >= asked or enough):
                return
            self.began = now
            if self.phase == "complaining" and answered >= needed:
                # Each sends envelopes that do not open to all its peers: one of these is enough to show it.
                told = self.answered["complaining"]
                self.excluded = {each for each in self.spoilers & self.answered["sharing"] if told - {each}}
                answered = len(told - self.excluded)
            if answered < needed:
                self.phase = "failed"
            else:
                self.phase = "committed" if self.phase == "unmasking" else PHASES[PHASES.index(self.phase) + 1]


def spoil(participant: Participant) -> None:
    """It sends its peers what does not open, under its own signature."""
    share = participant.share

    def hostile(cohort: Cohort) -> Shares:
        made = []
        for each in share(cohort).shares:
            ciphertext = bytes(len(each.ciphertext))
            associated = participant._session.associated(participant.device_id, each.peer)
            signature = sign_envelope(participant._identity, ciphertext, associated)
            made.append(EncryptedShare(peer=each.peer, ciphertext=ciphertext, signature=signature))
        return Shares(shares=made)

    participant.share = hostile  # type: ignore[method-assign]


class Rounds(RuleBasedStateMachine):
    keys: Keys
    bundle_file: Path
    empty_database: Path

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder, token, keys = self.stack.enter_context(temporary_folder(self.keys))
        self.world = open_world(folder, token, keys, self.bundle_file, self.empty_database)
        self.stack.callback(close_world, self.world)
        self.rounds: dict[str, Modelled] = {}
        self.made = 0

    def teardown(self) -> None:
        if hasattr(self, "task"):
            self.sums()
        self.stack.close()

    @initialize(
        rounds=st.integers(1, 3), goal=st.sampled_from([None, 3]), synchronous=st.booleans(),
        leaving=st.sampled_from([{0}, {0, 1}, set()]), phases=st.integers(0, len(PHASES)),
        spoiling=st.sampled_from([set(), {4}, {3, 4}]),
    )  # fmt: skip
    def begin(
        self, rounds: int, goal: int | None, synchronous: bool, leaving: set[int], phases: int, spoiling: set[int]
    ) -> None:
        """The first `phases` of a round go well, so that short runs reach the last ones, too."""
        self.goal, self.synchronous = goal, synchronous
        self.task = self.world.create_task(
            rounds=rounds, cohort=COHORT, min_cohort=MIN_COHORT, threshold=THRESHOLD, goal=goal,
            mode="synchronous" if synchronous else "semi-synchronous",
            deadlines=dict.fromkeys((*PHASES, "assigning", "aggregating"), SECONDS),
        )["task_id"]  # fmt: skip
        self.devices = self.world.add_devices(DEVICES)
        self.spoilers = {self.devices[number].id for number in spoiling}
        everybody = set(range(DEVICES))
        self.check_in(everybody)
        self.step()
        self.check_in(everybody)
        for number in leaving:
            self.leave(number)
        for _ in range(phases):
            self.answer(set())

    @rule(who=st.sets(st.integers(0, DEVICES - 1), min_size=1))
    def check_in(self, who: set[int]) -> None:
        for number in who:
            self._check_in(self.devices[number])

    def _check_in(self, device: Device) -> None:
        device.open_session()
        sealed = device.check_in()
        mine = [each for each in self.rounds.values() if device.id in each.members and each.phase in PHASES]
        if sealed is None:
            assert not any(each.has_part(device.id) for each in mine)
            return
        plan = unseal("plan", sealed, device.server_key, RoundPlan)
        known = self.rounds.get(plan.round_id)
        if known is None:
            assert not mine, "a device is in two rounds"
            shown = self.world.operator("GET", f"/v1/rounds/{plan.round_id}/participants")[1]
            members = {each["device_id"] for each in shown["participants"]}
            assert MIN_COHORT <= len(members) <= COHORT
            known = Modelled(members, self.world.clock.now, self.goal, self.synchronous, spoilers=self.spoilers)
            # It is some seconds old, if nobody came for it before.
            known.began = shown["phase_ends"] - SECONDS
            self.rounds[plan.round_id] = known
        assert known.has_part(device.id)
        if device.plan != plan:
            device.plan = plan
            device.participant = Participant(
                plan, plan_digest(sealed), device.key, device.chain, public_bytes(device.keys.enrolment),
                secrets.token_bytes,
            )  # fmt: skip
            if device.id in self.spoilers:
                spoil(device.participant)

    @rule(without=st.sets(st.integers(0, DEVICES - 1), max_size=1))
    def answer(self, without: set[int]) -> None:
        """Whoever can answers, in the phase that its round is in."""
        for number in set(range(DEVICES)) - without:
            device = self.devices[number]
            known = None if device.plan is None else self.rounds[device.plan.round_id]
            if known is None or known.phase not in PHASES or device.id in known.answered[known.phase]:
                continue
            if known.sending(known.phase, device.id) == 200:
                self._answer(device, known)
        self.step()

    def _answer(self, device: Device, known: Modelled) -> None:
        device.open_session()
        if known.phase == "masking":
            self.made += 1
            generator = np.random.default_rng(self.made)
            values = np.append(generator.integers(-3000, 3000, 8), (1 + self.made % 3) * 4096).astype(np.int64)
            device.vector = (values % 2**device.plan.modulus_bits).astype(np.uint32)
            known.updates[device.id] = values
        requests: list[Request] = []
        whole, device.transport = device.transport, lambda *request: requests.append(request) or whole(*request)
        try:
            device.answer(known.phase)  # fails unless it is taken
        finally:
            device.transport = whole
        known.answered[known.phase].add(device.id)
        known.sent[known.phase, device.id] = requests[-1]

    @rule(number=st.integers(0, DEVICES - 1), phase=st.sampled_from(PHASES), data=st.binary(min_size=1, max_size=4))
    def repeat(self, number: int, phase: str, data: bytes) -> None:
        """The same message again counts once; another one, or one at the wrong time, is refused."""
        device = self.devices[number]
        if device.plan is None:
            return
        known = self.rounds[device.plan.round_id]
        sent = known.sent.get((phase, device.id))
        device.open_session()
        if sent is not None:
            method, path, body, headers = sent
            headers = {**headers, "Authorization": f"Bearer {device.token}"}
            status, _ = device.transport(method, path, body, headers)
            assert status == (200 if known.phase in PHASES else 410)
        if phase == "masking" and known.phase != "masking":
            status, _ = device.try_upload(data)
            wanted = 409 if sent is not None and known.phase in PHASES else known.sending(phase, device.id)
            assert status == wanted

    @rule(number=st.integers(0, DEVICES - 1))
    def leave(self, number: int) -> None:
        """No phase waits any more for one that has left; what it sent before counts."""
        device = self.devices[number]
        if device.plan is None:
            return
        known = self.rounds[device.plan.round_id]
        device.open_session()
        status, _ = device.call("POST", f"{device.round}/leave", LeaveRequest())
        assert status == 200
        known.left.add(device.id)

    @rule(number=st.integers(0, DEVICES - 1), what=st.sampled_from(sorted(READ)))
    def read(self, number: int, what: str) -> None:
        device = self.devices[number]
        if device.plan is not None:
            device.open_session()
            status, _ = device.call("GET", f"{device.round}/{what}")
            assert status == self.rounds[device.plan.round_id].reading(READ[what], device.id)

    @rule()
    def step(self) -> None:
        self.world.settle()
        for known in self.rounds.values():
            known.settle(self.world.clock.now)

    @rule(seconds=st.sampled_from([1, 9, SECONDS + 1]))
    def wait(self, seconds: int) -> None:
        self.world.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.world.restart_coordinator()

    @invariant()
    def phases(self) -> None:
        if hasattr(self, "task"):
            shown = {each["round_id"]: each["phase"] for each in self.world.rounds(self.task)}
            for round_id, known in self.rounds.items():
                assert shown[round_id] == known.phase

    def sums(self) -> None:
        """Each version is the one before plus the weighted mean of those whose update was acknowledged in time."""
        expected, committed = np.zeros(8), 0
        # By number: the clock may have stood still, and then the list's order is that of the ids.
        for row in sorted(self.world.rounds(self.task), key=lambda row: row["number"]):
            if row["phase"] != "committed":
                assert row["weights_out"] is None
                continue
            known = self.rounds[row["round_id"]]
            assert set(row["survivors"]) == known.answered["masking"]
            total = np.sum([known.updates[device] for device in row["survivors"]], axis=0)
            expected = expected + total[:8] * DELTA_STEP / (total[8] * WEIGHT_STEP)
            status, data = self.world.operator("GET", f"/v1/blobs/{row['weights_out']}")
            assert status == 200
            found = read_weights(data)
            values = np.concatenate([found["w"].ravel(), found["b"]])
            np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)
            committed += 1
        assert self.world.task(self.task)["rounds_committed"] == committed
        type(self).committed += committed

    committed = 0


@pytest.mark.parametrize(
    ("examples", "steps"), [(8, 40), pytest.param(300, 80, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.sampled(every=8)
def test_secure_rounds_are_those_of_the_model(
    keys: Keys, bundle_file: Path, empty_database: Path, examples: int, steps: int
) -> None:
    machine = run_machine(
        Rounds,
        examples=examples,
        steps=steps,
        derandomize=True,
        keys=keys,
        bundle_file=bundle_file,
        empty_database=empty_database,
    )
    assert machine.committed > 0 or examples < 100  # a few may all be cut short
