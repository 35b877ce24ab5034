"""Any order of check-ins, uploads, steps, delays and an operator's orders: the rounds are those of a small model.

The model knows what was acknowledged to whom. Every committed round must be the mean of acknowledged updates that it
names, each of them once; no round may be overdue; what was refused must not count.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from archipel.bundle import read_weights, write_weights
from tests.server.rounds.machine import run_machine
from tests.server.rounds.test_plain_rounds import update
from tests.support.devices import Keys
from tests.support.world import close_world, open_world, temporary_folder

DEVICES = 5
LIVE = ("running", "paused")


class Rounds(RuleBasedStateMachine):
    """`given` maps (round, device) to the acknowledged update and the number of the version it was made for."""

    keys: Keys
    bundle_file: Path
    empty_database: Path

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder, token, keys = self.stack.enter_context(temporary_folder(self.keys))
        self.world = open_world(folder, token, keys, self.bundle_file, self.empty_database)
        self.stack.callback(close_world, self.world)
        self.given: dict[tuple[str, str], tuple[dict[str, np.ndarray], int]] = {}
        self.state, self.unseen = "running", False
        self.made = 0

    def teardown(self) -> None:
        if hasattr(self, "task"):
            self.whole()
        self.stack.close()

    @initialize(buffered=st.booleans(), rounds=st.integers(1, 3), goal=st.sampled_from([None, 3]))
    def begin(self, buffered: bool, rounds: int, goal: int | None) -> None:
        mode = {"mode": "asynchronous", "cohort": 3, "concurrency": 4} if buffered else {"cohort": 4, "goal": goal}
        deadlines = {"assigning": 10, "updating": 20, "buffering": 60, "aggregating": 5}
        self.buffered, self.rounds = buffered, rounds
        self.task = self.world.create_task(privacy="plain", threshold=None, rounds=rounds, deadlines=deadlines, **mode)[
            "task_id"
        ]
        self.devices = self.world.add_devices(DEVICES)

    @rule(number=st.integers(0, DEVICES - 1))
    def check_in(self, number: int) -> None:
        device = self.devices[number]
        device.open_session()
        if device.join():
            # A round is live until the coordinator has seen that its task was cancelled.
            assert self.state in LIVE or self.unseen
            assert (device.plan.round_id, device.id) not in self.given, "asked for an update that it gave already"

    @rule(number=st.integers(0, DEVICES - 1), other=st.booleans())
    def upload(self, number: int, other: bool) -> None:
        device = self.devices[number]
        if device.plan is None:
            return
        key = (device.plan.round_id, device.id)
        before = self.given.get(key)
        if before is None or other:
            self.made += 1
            values = update(self.made, 1.0 + self.made % 3)
        else:
            values = before[0]
        device.open_session()
        status, answer = device.try_upload(write_weights(values))
        if status == 200:
            assert before is None or not other, "a second update was taken"
            self.given[key] = values, device.plan.number
        else:
            assert status in ((409, 410) if before else (410,)), answer

    @rule()
    def step(self) -> None:
        self.world.settle()
        self.unseen = False

    @rule(seconds=st.sampled_from([1, 9, 21, 61]))
    def wait(self, seconds: int) -> None:
        self.world.clock.now += seconds

    @rule()
    def restart(self) -> None:
        self.world.restart_coordinator()

    @precondition(lambda self: self.state in LIVE)
    @rule(order=st.sampled_from(["pause", "resume", "pause", "resume", "cancel"]))
    def order(self, order: str) -> None:
        self.state = self.world.task(self.task)["state"]
        status, answer = self.world.operator("POST", f"/v1/tasks/{self.task}/{order}")
        assert status == (200 if self.state in LIVE or order == "cancel" else 409)
        if self.state in LIVE:
            self.unseen = order == "cancel"
            self.state = {"pause": "paused", "resume": "running", "cancel": "cancelled"}[order]
            assert answer["state"] == self.state

    @invariant()
    def known(self) -> None:
        if not hasattr(self, "task"):
            return
        shown = self.world.task(self.task)
        if shown["state"] != self.state:
            assert self.state == "running" or self.state == "paused"
            assert shown["state"] in ("completed", "failed")
            self.state = shown["state"]
        assert shown["rounds_committed"] <= self.rounds
        assert (shown["state"] == "completed") == (shown["rounds_committed"] == self.rounds)

    def whole(self) -> None:
        """Settled, nothing is overdue, and the newest version follows from what was acknowledged."""
        self.world.settle()
        rounds = sorted(self.world.rounds(self.task), key=lambda row: row["number"])
        live = [row for row in rounds if row["ended"] is None]
        assert len(live) <= 1
        assert all(row["phase_ends"] > self.world.clock.now for row in live)
        expected = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
        counted, steps = set(), []
        for row in (row for row in rounds if row["phase"] == "committed"):
            scaled, weight = {name: np.zeros_like(array) for name, array in expected.items()}, 0.0
            assert len(row["survivors"]) >= 3
            if not self.buffered:
                assert set(row["survivors"]) == {
                    device for round_id, device in self.given if round_id == row["round_id"]
                }
            for device in row["survivors"]:
                # The device's oldest update that no earlier version has.
                key = next(
                    key for key in self.given
                    if key[1] == device and key not in counted and (self.buffered or key[0] == row["round_id"])
                )  # fmt: skip
                counted.add(key)
                values, number = self.given[key]
                scale = (1.0 + row["number"] - number) ** -0.5
                for name in scaled:
                    scaled[name] += scale * values[f"{name}.update"].astype(np.float64)
                weight += float(values["weight"])
            assert row["weight_sum"] == pytest.approx(weight)
            length = np.sqrt(sum(np.square(step).sum() for step in scaled.values())) / weight
            # Of these few rounds at most three: the longest so far, and three times that.
            shorter = min(1.0, 3 * max(steps) / length) if steps else 1.0
            assert row["step_scale"] == pytest.approx(shorter)
            steps.append(length * shorter)
            for name in expected:
                change = shorter * scaled[name] / weight
                expected[name] = (expected[name] + change).astype(np.float32).astype(np.float64)
        model = self.world.task(self.task)["model"]
        if model is not None:
            status, data = self.world.operator("GET", f"/v1/blobs/{model}")
            assert status == 200
            for name, array in read_weights(data).items():
                np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("examples", "steps"), [(12, 30), pytest.param(400, 60, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_rounds_are_those_of_the_model(
    keys: Keys, bundle_file: Path, empty_database: Path, examples: int, steps: int
) -> None:
    run_machine(
        Rounds, examples=examples, steps=steps, keys=keys, bundle_file=bundle_file, empty_database=empty_database
    )
