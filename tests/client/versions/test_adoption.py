"""Versions that a server offers, on real devices: adopted, kept out, taken back."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from archipel.bundle import generate_key
from archipel.client.versions.adoption import Adoption
from archipel.client.versions.offer_book import RETRY_SECONDS, RETRY_SOON_SECONDS
from archipel.errors import ClientError
from archipel.protocol.messages import CheckIn, CheckInResponse
from archipel.protocol.operator.registry import Gate, RolloutRequest, Stage
from archipel.protocol.sealed import encode, public_bytes
from tests.support.linear_bundle import local_data
from tests.support.registry import BEST, BETTER, FIRST, FRAGILE, MODEL, WORSE, Registry, X

linux = pytest.mark.skipif(sys.platform != "linux", reason="child processes with limits need Linux")


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=linux)])
@pytest.mark.sampled(every=8)
def test_the_first_version_and_a_better_one(registry: Registry, isolated: bool) -> None:
    agent = registry.device(isolated=isolated)
    with pytest.raises(ClientError, match="runs no version of it; it runs: none"):
        agent.model(MODEL)
    assert agent.run_once().kind == "waiting"
    assert registry.federation.names(agent) == ["enrolled", "offered", "adopted"]
    assert agent.models == {MODEL: 1}
    np.testing.assert_allclose(agent.model(MODEL).predict(X), registry.answer(1), rtol=1e-6)
    assert registry.counted() == {1: 0}  # told when it checks in again
    agent.run_once()
    assert registry.counted() == {1: 1}
    registry.add(BETTER)
    agent.run_once()
    assert agent.models == {MODEL: 2}
    np.testing.assert_allclose(agent.model(MODEL).predict(X), registry.answer(2), rtol=1e-6)
    [first, second] = registry.told(agent, "adopted")
    assert (first["version"], first["before"], "metric" in first) == (1, 0, False)
    assert (second["version"], second["before"], second["metric"]) == (2, 1, "loss")
    assert second["offered"] == pytest.approx(registry.loss(2), rel=1e-5)
    assert second["running"] == pytest.approx(registry.loss(1), rel=1e-5)
    agent.run_once()
    assert registry.counted() == {1: 0, 2: 1}
    agent.close()
    with registry.federation.agent(0, enrol=False, adopt=True) as again:
        assert again.models == {MODEL: 2}
        np.testing.assert_allclose(again.model(MODEL).predict(X), registry.answer(2), rtol=1e-6)
        assert again.model(MODEL).state.a.version == 1  # to return to


@pytest.mark.sampled(every=8)
def test_weights_of_a_task_and_what_is_personal(registry: Registry) -> None:
    """A round moves the personal offset of each device; the next version of the model goes on with it."""
    agents = [registry.device(number) for number in range(3)]
    for agent in agents:
        agent.run_once()
        agent.model(MODEL)
    made = registry.add_trained(agents)
    assert made.weights is not None
    kept = [registry.federation.states(agent.config.folder)[0].personal["b"] for agent in agents]
    assert len({float(b) for b in kept}) == 3
    for agent, b in zip(agents, kept, strict=True):
        slots = agent.model(MODEL)
        assert slots.state.slot(slots.state.running).version == 1
        agent.run_once()
        assert agent.models == {MODEL: 2}
        np.testing.assert_allclose(slots.predict(X), registry.answer(2, b), rtol=1e-5)
        [*_, last] = registry.told(agent, "adopted")
        data = local_data(agents.index(agent))
        loss = np.mean((data["x"] @ registry.w[2] + b - data["y"]) ** 2)
        assert last["offered"] == pytest.approx(float(loss), rel=1e-4)
        # The slots hold what is public alone.
        learned = (agent.config.folder / "models" / MODEL / slots.state.running / "learned.safetensors").read_bytes()
        assert b"parameter/w" in learned
        assert b"personal" not in learned


@pytest.mark.sampled(every=4)
def test_a_round_changes_what_a_model_that_was_given_out_says(registry: Registry) -> None:
    agents = [registry.device(number) for number in range(2)]
    agents[1].run_once()
    slots = agents[1].model(MODEL)
    np.testing.assert_allclose(slots.predict(X), registry.answer(1), rtol=1e-6)
    registry.add_trained(agents, promote=False)
    agents[1].run_once()
    [kept] = registry.federation.states(agents[1].config.folder)
    np.testing.assert_allclose(slots.predict(X), registry.answer(1, kept.personal["b"]), rtol=1e-5)


@pytest.mark.sampled(every=4)
def test_a_worse_version_is_kept_out_and_tried_again(registry: Registry) -> None:
    now = [1e9]
    agent = registry.device()
    agent._adoption = Adoption(agent._device, lambda: now[0])
    agent.run_once()
    registry.add(WORSE)
    for _ in range(3):
        agent.run_once()
    assert agent.models == {MODEL: 1}
    [kept] = registry.told(agent, "kept")
    assert (kept["version"], kept["runs"], kept["metric"]) == (2, 1, "loss")
    assert kept["offered"] == pytest.approx(registry.loss(2), rel=1e-5)
    assert kept["running"] == pytest.approx(registry.loss(1), rel=1e-5)
    assert "worse by more than 0.05" in kept["reason"]
    assert registry.counted() == {1: 0, 2: 1}  # it fetched the one and runs the other, which it tells nobody
    assert not (agent.config.folder / "models" / MODEL / "b").exists()  # the old one's place was not needed
    agent.close()
    agent = registry.federation.agent(0, enrol=False, adopt=True)
    agent._adoption = Adoption(agent._device, lambda: now[0])
    for seconds, times in ((RETRY_SECONDS - 1, 1), (2, 2), (-10 * RETRY_SECONDS, 3), (1, 3)):
        now[0] += seconds
        agent.run_once()
        assert len(registry.told(agent, "kept")) == times
    registry.add(FIRST, model="another")
    agent.run_once()
    assert len(registry.told(agent, "kept")) == 3
    assert agent.models == {MODEL: 1, "another": 1}


@pytest.mark.sampled(every=4)
def test_a_device_that_goes_from_round_to_round_adopts_too(registry: Registry) -> None:
    agents = [registry.device(number) for number in range(3)]
    for agent in agents:
        agent.run_once()
    federation, operator = registry.federation, registry.federation.operator
    plain: dict[str, Any] = {"privacy": "plain", "threshold": None, "deadlines": {"assigning": 3, "updating": 5}}
    task = federation.task(bundle=operator.models.version(MODEL, 1).bundle, min_cohort=3, cohort=3, rounds=50, **plain)
    seen = encode(CheckIn(versions={MODEL: 1}))
    while not any(each.phase == "updating" for each in federation.rounds(task)):
        for agent in agents:  # they wait to be taken, however slow this machine is, and are not told here
            agent._connect()[1].call("POST", "/v1/check-ins", CheckInResponse, body=seen)
    registry.add(BETTER)
    federation.run(agents, lambda: all(agent.models == {MODEL: 2} for agent in agents))
    operator.tasks.cancel(task.task_id)
    for agent in agents:
        names = federation.names(agent)
        assert names[:4] == ["enrolled", "offered", "adopted", "assigned"]
        # With the plan of the first round, and when that was over.
        assert names[4 : names.index("adopted", 4)].count("assigned") == 0
        assert "committed" in names[: names.index("adopted", 4)]


@pytest.mark.sampled(every=3)
def test_how_much_worse_is_the_owners_to_say(registry: Registry) -> None:
    agents = [registry.device(number, max_worse=worse) for number, worse in ((0, 0.0), (1, 1e6))]
    for agent in agents:
        agent.run_once()
    registry.add(WORSE)
    for agent in agents:
        agent.run_once()
    assert [agent.models[MODEL] for agent in agents] == [1, 2]


@pytest.mark.sampled(every=3)
def test_what_the_server_takes_back_is_not_compared(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    for w in (BETTER, BEST):
        registry.add(w)
        agent.run_once()
    assert agent.models == {MODEL: 3}
    operator = registry.federation.operator
    operator.models.roll_back(MODEL)
    (agent.config.folder / "cache" / "bundles").rename(agent.config.folder / "cache" / "gone")
    (agent.config.folder / "cache" / "bundles").mkdir()
    agent.run_once()
    assert agent.models == {MODEL: 2}
    # Fetched, as on a device that has it in no slot: the server is to see no difference.
    assert len(list((agent.config.folder / "cache" / "bundles").iterdir())) == 1
    operator.models.promote(MODEL, 1)
    agent.run_once()
    assert agent.models == {MODEL: 1}
    np.testing.assert_allclose(agent.model(MODEL).predict(X), registry.answer(1), rtol=1e-6)
    assert "took back" in registry.told(agent, "adopted")[-1]["reason"]
    operator.models.promote(MODEL, 3)  # and a version that was taken back is not out for ever
    agent.run_once()
    assert agent.models == {MODEL: 3}
    assert registry.told(agent, "kept") == []


@pytest.mark.sampled(every=3)
def test_a_version_kept_out_wins_where_it_is_what_the_server_goes_back_to(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    registry.add(WORSE)
    agent.run_once()
    registry.add(BEST)
    agent.run_once()
    assert agent.models == {MODEL: 3}
    registry.federation.operator.models.roll_back(MODEL)
    agent.run_once()
    assert agent.models == {MODEL: 2}


@pytest.mark.sampled(every=3)
def test_a_rollout_of_an_older_version_that_is_aborted(registry: Registry) -> None:
    """Its number says nothing then: what is for all devices is what ran before."""
    agent = registry.device()
    registry.add(BEST, promote=False)
    registry.add(BETTER)
    agent.run_once()
    operator = registry.federation.operator
    stages = [Stage(percent=100, soak_seconds=3600)]
    rollout = operator.rollouts.create(RolloutRequest(model=MODEL, version=2, stages=stages, gate="none"))
    agent.run_once()
    assert agent.models == {MODEL: 2}
    operator.rollouts.abort(rollout.rollout_id)
    agent.run_once()
    assert agent.models == {MODEL: 3}
    assert registry.loss(3) > 1.05 * registry.loss(2)


@pytest.mark.sampled(every=4)
def test_a_rollout_with_its_gate(registry: Registry) -> None:
    agents = [registry.device(number) for number in range(3)]
    for agent in agents:
        agent.run_once()
    registry.add(BETTER, promote=False)
    gate = Gate(
        metric="loss", range=100.0, better="lower", max_loss=0.1, privacy="plain", min_devices=2, max_devices=3,
        seconds=60.0,
    )  # fmt: skip
    asked = RolloutRequest(model=MODEL, version=2, stages=[Stage(percent=100, soak_seconds=0.5)], gate=gate)
    operator = registry.federation.operator
    rollout = operator.rollouts.create(asked)
    registry.federation.run(agents, lambda: operator.rollouts.get(rollout.rollout_id).ended is not None)
    assert operator.rollouts.get(rollout.rollout_id).state == "completed"
    assert [agent.models for agent in agents] == [{MODEL: 2}] * 3
    assert operator.models.get(MODEL).promoted == 2
    for agent in agents:
        agent.run_once()
    assert registry.counted() == {1: 0, 2: 3}


@pytest.mark.parametrize("how", ["no evaluate program", "no labelled examples"])
@pytest.mark.sampled(every=4)
def test_what_cannot_be_compared_is_adopted_after_the_self_test(registry: Registry, how: str) -> None:
    more: dict[str, Any] = {"examples": lambda: {"x": X}} if how == "no labelled examples" else {}
    agent = registry.device(**more)
    agent.run_once()
    registry.add(WORSE, evaluate=how != "no evaluate program")
    agent.run_once()
    assert agent.models == {MODEL: 2}
    reason = registry.told(agent, "adopted")[-1]["reason"]
    assert reason.startswith("after the self-test alone")
    assert how in reason


@pytest.mark.parametrize("error", [OSError(5, "Input/output error", "data.npz"), ClientError("the store is damaged")])
@pytest.mark.sampled(every=4)
def test_examples_that_cannot_be_read_say_nothing_about_the_version(registry: Registry, error: Exception) -> None:
    now, broken = [1e9], [True]

    def examples() -> dict[str, np.ndarray]:
        if broken[0]:
            raise error
        return local_data(0)

    agent = registry.device(examples=examples)
    agent._adoption = Adoption(agent._device, lambda: now[0])
    agent.run_once()
    registry.add(BETTER)
    for _ in range(2):
        assert agent.run_once().kind == "waiting"
    [kept] = registry.told(agent, "kept")
    assert "the examples cannot be read" in kept["reason"]
    assert str(error) in kept["reason"]
    broken[0] = False
    now[0] += RETRY_SOON_SECONDS - 1
    agent.run_once()
    assert agent.models == {MODEL: 1}
    now[0] += 2
    agent.run_once()
    assert agent.models == {MODEL: 2}
    [adopted] = registry.told(agent, "adopted")[1:]
    assert adopted["running"] == pytest.approx(registry.loss(1), rel=1e-5)


@pytest.mark.sampled(every=8)
def test_a_full_disk_says_nothing_about_the_version(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each write of an adoption: it is tried again, unless it had been adopted by then."""
    now = [1e9]
    before: int | None = None

    def full(handle: int) -> None:
        nonlocal before
        if before is not None and threading.current_thread() is threading.main_thread():
            before -= 1
            if before < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", full)
    agent = registry.device()
    agent._adoption = Adoption(agent._device, lambda: now[0])
    agent.run_once()
    kept = 0
    for writes in itertools.count():
        version = 2 + writes
        registry.add((0.5 + writes / 1e4, -0.5, 1.0))  # no two alike
        before = writes
        agent.run_once()
        left, before = before, None
        if left >= 0:
            break
        told = registry.told(agent, "kept")[kept:]
        kept += len(told)
        if agent.models == {MODEL: version - 1}:
            assert all("No space left" in each["reason"] for each in told)
            now[0] += RETRY_SECONDS + 1
            agent.run_once()
        assert agent.models == {MODEL: version}, writes
    assert writes > 10
    assert kept > 5


WRONG = [
    ({"tested": WORSE}, "deviates"),
    ({"peak_bytes": 1 << 40}, "max_peak_bytes"),
    ({"predict": FRAGILE.replace("1000.0", "-1000.0")}, "loss is nan, expected a finite number"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
@pytest.mark.sampled(every=4)
def test_what_is_not_fit_to_run_is_kept_out(registry: Registry, wrong: dict[str, Any], said: str) -> None:
    agent = registry.device()
    agent.run_once()
    registry.add(BEST, **wrong)
    for _ in range(2):
        assert agent.run_once().kind == "waiting"
    assert agent.models == {MODEL: 1}
    [kept] = registry.told(agent, "kept")
    assert said in kept["reason"]
    np.testing.assert_allclose(agent.model(MODEL).predict(X), registry.answer(1), rtol=1e-6)
    registry.add(BETTER)
    agent.run_once()
    assert agent.models == {MODEL: 3}


@pytest.mark.sampled(every=3)
def test_a_bundle_that_is_too_large_or_not_of_a_pinned_publisher(registry: Registry) -> None:
    small = registry.device(0, max_download_bytes=1000)
    strange = registry.device(1, enrol=False)
    strange.enrol(registry.federation.token(publisher_keys=[public_bytes(generate_key())]))
    for agent in (small, strange):
        for _ in range(2):
            assert agent.run_once().kind == "waiting"
        assert agent.models == {}
        assert list((agent.config.folder / "cache" / "bundles").iterdir()) == []
    assert "1000" in registry.told(small, "kept")[0]["reason"]
    assert "none of the 1 trusted keys signed" in registry.told(strange, "kept")[0]["reason"]
    assert [len(registry.told(agent, "kept")) for agent in (small, strange)] == [1, 1]


@pytest.mark.sampled(every=3)
def test_a_version_that_fails_when_it_is_used(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    registry.add(BEST, predict=FRAGILE)
    agent.run_once()
    assert agent.models == {MODEL: 2}
    slots = agent.model(MODEL)
    np.testing.assert_allclose(slots.predict(1000 * X), 1000 * registry.answer(1), rtol=1e-5)
    assert agent.models == {MODEL: 1}
    for _ in range(2):
        agent.run_once()
    assert registry.counted() == {1: 0, 2: 1}
    [kept] = registry.told(agent, "kept")
    assert (kept["version"], kept["runs"]) == (2, 1)
    assert "not finite" in kept["reason"]


@pytest.mark.sampled(every=3)
def test_predictions_go_on_while_versions_are_adopted(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    slots = agent.model(MODEL)
    answers: list[np.ndarray] = []
    stop = threading.Event()

    def predict() -> None:
        while not stop.is_set():
            answers.append(slots.predict(X))
            time.sleep(0.001)

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        for w in (BETTER, BEST):
            registry.add(w)
            agent.run_once()
    finally:
        stop.set()
        thread.join()
    assert agent.models == {MODEL: 3}
    expected = [registry.answer(number) for number in (1, 2, 3)]
    found = [next(number for number, each in enumerate(expected, 1) if np.allclose(each, answer)) for answer in answers]
    assert {1, 2} <= set(found)
    np.testing.assert_allclose(slots.predict(X), registry.answer(3), rtol=1e-6)


@pytest.mark.sampled(every=4)
def test_another_process_loads_what_runs(registry: Registry) -> None:
    agent = registry.device()
    agent.run_once()
    agent.model(MODEL).predict(X)
    program = (
        "import sys, numpy as np; from archipel import lite_runtime as l; "
        "print(l.load(l.running_slot(sys.argv[1]), [bytes.fromhex(sys.argv[2])]).predict(np.eye(3, dtype='float32')))"
    )
    key = public_bytes(registry.federation.publisher_key).hex()
    done = subprocess.run(
        [sys.executable, "-c", program, str(agent.config.folder / "models" / MODEL), key],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "[0.1 0.2 0.3]"


def test_an_owner_who_does_not_want_versions(registry: Registry) -> None:
    agent = registry.device(adopt=False)
    agent.run_once()
    assert registry.federation.names(agent) == ["enrolled"]
    assert not (agent.config.folder / "models").exists()
