"""Agents in secure rounds with the real server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select

from archipel.client import Agent, Event, Outcome
from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.protocol.messages import RoundStatus
from archipel.protocol.operator.tasks import TaskInfo
from archipel.server.database.tables import DeviceSession, Round
from tests.support.federation import Federation
from tests.support.linear_bundle import local_data


def ended(federation: Federation, task: TaskInfo) -> Callable[[], bool]:
    return lambda: federation.operator.tasks.get(task.task_id).state != "running"


def check_sum(federation: Federation, task: TaskInfo, survivors: list[tuple[Agent, int]]) -> None:
    [info] = [r for r in federation.rounds(task) if r.phase == "committed"][-1:]
    assert sorted(info.survivors) == sorted(agent.device_id for agent, _ in survivors)
    start = federation.operator.weights.read(info.weights_in)["w"]
    expected = federation.expected_weights(start, survivors, task)
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)


@pytest.mark.parametrize("why", ["it cannot compute", "its owner refuses"])
@pytest.mark.sampled(every=8)
def test_the_others_do_not_wait_for_a_device_that_leaves(federation: Federation, why: str) -> None:
    def spoilt() -> dict[str, np.ndarray]:
        return {name: np.full_like(array, np.nan) for name, array in local_data(3).items()}

    more: dict[str, Any] = {"max_upload_bytes": 1} if why == "its owner refuses" else {"examples": spoilt}
    agents = [*(federation.agent(number) for number in range(3)), federation.agent(3, **more)]
    task = federation.task(cohort=4, rounds=2, deadlines={"advertising": 600})
    federation.run(agents, ended(federation, task))
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents[:3], range(3))))
    assert [entry.result for entry in agents[3].rounds] == ["refused" if more.get("max_upload_bytes") else "dropped"]
    first, second = federation.rounds(task)
    assert [each.device_id for each in first.participants if each.left] == [agents[3].device_id]
    assert first.refused == {"size" if more.get("max_upload_bytes") else "diverged": 1}
    # It rests, and the round does not wait for a fourth device either.
    assert [each.left for each in second.participants] == [False] * 3


@pytest.mark.sampled(every=4)
def test_rounds_end_with_the_plain_sum(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(4)]
    task = federation.task(rounds=2)
    federation.run(agents, ended(federation, task))
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents, range(4))))
    for number, agent in enumerate(agents):
        steps = ["assigned", "trained", "advertised", "shared", "masked", "uploaded", "confirmed", "unmasked"]
        assert federation.names(agent) == ["enrolled", *[*steps, "committed"] * 2]
        entries = agent.rounds
        assert [(e.number, e.result, e.step, e.examples) for e in entries] == [
            (1, "took_part", "closed", 5 + number),
            (2, "took_part", "closed", 5 + number),
        ]
        # Four entries of three bytes are the update; the rest are keys, shares and signatures.
        assert min(entry.sent for entry in entries) > 12
        assert entries[0].received > federation.bundle_file.stat().st_size
        # State that lives on the device counted the steps of both rounds.
        [state] = federation.states(agent.config.folder)
        steps_made = 2 * 2 * -(-(5 + number) // 4)
        assert float(state.state["seen"]) == steps_made
    requests = [json.loads(line) for line in federation.server.settings.request_log.read_text().splitlines()]
    fetched = [each["device"] for each in requests if each["method"] == "GET" and "/bundles/" in each["path"]]
    assert sorted(fetched) == sorted(agent.device_id for agent in agents)  # each of them once


@pytest.mark.sampled(every=4)
def test_events_tell_bytes_and_details(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(3)]
    task = federation.task(cohort=3)
    federation.run(agents, ended(federation, task))
    mine: list[Event] = [e for e in federation.events if e.device_id == agents[1].device_id and e.round_id]
    by_name = {event.name: event for event in mine}
    assert by_name["trained"].detail["examples"] == 6
    assert by_name["trained"].detail["steps"] == 4
    assert by_name["masked"].detail == {"bytes": 12}
    assert by_name["shared"].detail == {"cohort": 3}
    assert by_name["confirmed"].detail == {"survivors": 3}
    sent = [event.bytes_sent for event in mine]
    assert sent == sorted(sent)
    assert by_name["uploaded"].bytes_sent == by_name["masked"].bytes_sent + 12
    assert sent[-1] == agents[1].rounds[0].sent


class Leaver:
    """Conditions of a device that goes away for good when a round comes into `phase`."""

    def __init__(self, federation: Federation, phase: str) -> None:
        self._federation, self._phase, self._gone = federation, phase, False

    def __call__(self) -> bool:
        with self._federation.server._services.database.read() as session:
            self._gone = self._gone or self._phase in session.scalars(select(Round.phase))
        return not self._gone


@pytest.mark.parametrize("phase", ["complaining", "masking"])
@pytest.mark.sampled(every=8)
def test_devices_that_vanish_after_sharing_keys_are_left_out(federation: Federation, phase: str) -> None:
    agents = [federation.agent(number) for number in range(3)]
    leavers = [federation.agent(number, conditions=Leaver(federation, phase)) for number in (3, 4)]
    task = federation.task(cohort=5, min_cohort=3, threshold=3, deadlines={phase: 0.7})
    federation.run([*agents, *leavers], ended(federation, task))
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents, range(3))))
    for agent in leavers:
        assert "shared" in federation.names(agent)
        assert "dropped" in federation.names(agent)
        [entry] = agent.rounds
        assert (entry.result, entry.masked) == ("dropped", None)
        assert "conditions" in entry.reason
        # What was learnt in a round that did not count is not remembered.
        assert not list((agent.config.folder / "state").glob("*.sealed"))


@pytest.mark.parametrize(
    ("phase", "lacking"),
    [("complaining", "1 devices opened their shares"), ("masking", "1 masked updates arrived")],
)
@pytest.mark.sampled(every=4)
def test_a_round_below_the_threshold_fails_and_nobody_remembers_it(
    federation: Federation, phase: str, lacking: str
) -> None:
    first = federation.agent(0)
    leavers = [federation.agent(number, conditions=Leaver(federation, phase)) for number in (1, 2)]
    task = federation.task(cohort=3, deadlines={phase: 0.5, "assigning": 3.0})
    federation.run([first, *leavers], lambda: "dropped" in federation.names(first))
    [entry] = first.rounds
    assert entry.result == "dropped"
    assert lacking in entry.reason
    assert federation.operator.tasks.get(task.task_id).failed_rounds == 1
    assert not list((first.config.folder / "state").glob("*.sealed"))
    assert not list((first.config.folder / "rounds").glob("*.masked"))


def test_conditions_are_asked_before_work(federation: Federation) -> None:
    agent = federation.agent(0, conditions=lambda: False)
    outcome = agent.run_once()
    assert (outcome.kind, outcome.wait) == ("paused", agent.config.pause_seconds)
    assert federation.names(agent) == ["enrolled", "paused"]


@pytest.mark.sampled(every=4)
def test_conditions_that_end_in_a_round_hold_it_up_until_they_hold_again(federation: Federation) -> None:
    reasons = iter(["", "", "the battery is low", "the battery is low"])
    agents = [federation.agent(number) for number in range(2)]
    agents.append(federation.agent(2, conditions=lambda: "" if not agents[2].rounds else next(reasons, "")))
    task = federation.task(cohort=3)
    federation.run(agents, ended(federation, task))
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents, range(3))))
    assert federation.names(agents[2])[:4] == ["enrolled", "assigned", "trained", "paused"]
    assert federation.names(agents[2])[4] == "resumed"
    [paused] = [e for e in federation.events if e.name == "paused"]
    assert "the battery is low" in paused.detail["reason"]


@pytest.mark.sampled(every=4)
def test_a_round_that_stood_still_for_too_long_can_be_taken_up_again_before_keys_are_sent(
    federation: Federation, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    willing = {"now": True}
    agents = [federation.agent(number) for number in range(2)]
    pausing = federation.agent(2, conditions=lambda: willing["now"] or not pausing.rounds)
    task = federation.task(cohort=3)
    stop = threading.Event()
    threads = [threading.Thread(target=agent.run_forever, args=(stop,)) for agent in agents]
    for thread in threads:
        thread.start()
    try:
        willing["now"] = False
        outcome = outcome_of(pausing, "paused")
        assert "setting resume_within" in outcome.reason
        [entry] = pausing.rounds
        assert (entry.step, entry.result) == ("assigned", "")
        willing["now"] = True
        assert outcome_of(pausing, "took_part").examples == 7
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert federation.wait(task).state == "completed"
    assert len(pausing.rounds) == 1


@pytest.mark.sampled(every=4)
def test_stopping_leaves_the_round(federation: Federation) -> None:
    agent = federation.agent(0)
    federation.agent(1).run_once()
    federation.agent(2).run_once()
    federation.task(cohort=3)
    # Its peers checked in, but will not advertise: the round cannot leave that phase.
    federation.run([agent], lambda: "advertised" in federation.names(agent))
    [entry] = agent.rounds
    assert (entry.result, entry.reason) == ("dropped", "the agent was stopped")
    # The agent can go on afterwards, and does not take that round up again.
    assert agent.run_once().kind == "waiting"


@pytest.mark.sampled(every=4)
def test_an_error_of_the_owners_code_is_passed_on(federation: Federation) -> None:
    def broken() -> dict[str, np.ndarray]:
        raise KeyError("no examples today")

    agent = federation.agent(0, examples=broken)
    for number in (1, 2):
        federation.agent(number).run_once()
    federation.task(cohort=3)
    with pytest.raises(KeyError, match="no examples today"):
        federation.run([agent], lambda: False)
    [entry] = agent.rounds
    assert entry.step == "assigned"


@pytest.mark.sampled(every=3)
def test_examples_that_do_not_fit_are_refused(
    federation: Federation, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    agent = federation.agent(0, examples=lambda: {"x": np.zeros((3, 2), np.float32), "y": np.zeros(3, np.float32)})
    for number in (1, 2):
        federation.agent(number).run_once()
    federation.task(cohort=3)
    outcome = outcome_of(agent, "refused")
    assert "'x' must be float32[n, 3], got float32[3, 2]" in outcome.reason
    assert agent.run_once().kind == "waiting"


@pytest.mark.sampled(every=3)
def test_a_loss_that_is_not_finite_drops_the_device(
    federation: Federation, outcome_of: Callable[[Agent, str], Outcome]
) -> None:
    bad = {"x": np.full((3, 3), np.nan, np.float32), "y": np.zeros(3, np.float32)}
    agent = federation.agent(0, examples=lambda: bad)
    for number in (1, 2):
        federation.agent(number).run_once()
    federation.task(cohort=3)
    assert "the loss is nan" in outcome_of(agent, "dropped").reason


# --- sessions and the server's absence ----------------------------------------------------------------------------


@pytest.mark.sampled(every=3)
def test_a_revoked_session_is_renewed(federation: Federation) -> None:
    agent = federation.agent(0)
    assert agent.run_once().kind == "waiting"
    with federation.server._services.database.write() as session:
        session.execute(delete(DeviceSession))
    federation.server.stop()
    federation.server.start()
    assert agent.run_once().kind == "waiting"


def test_a_session_is_renewed_before_it_expires(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = federation.agent(0)
    agent.run_once()
    session = agent._session
    assert session is not None
    token = session._token
    # The server's sessions last 900 s; it is renewed at 80 % of that.
    assert 650 < session._renew_at - time.monotonic() < 725
    session._renew_at = time.monotonic() - 1
    agent.run_once()
    assert session._token != token


@pytest.mark.sampled(every=4)
def test_a_server_that_is_away_is_waited_out(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(3)]
    task = federation.task(cohort=3, rounds=2)
    federation.server.stop()
    with pytest.raises(UnreachableError, match="failed 3 times"):
        agents[0].run_once()
    back = threading.Timer(0.4, federation.server.start)
    back.start()
    federation.run(agents, lambda: sum(e.name == "committed" for e in federation.events) == 6)
    back.join()
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents, range(3))))


@pytest.mark.sampled(every=4)
def test_a_server_that_restarts_within_a_round_goes_on_with_it(federation: Federation) -> None:
    restarted = threading.Event()

    def restart(event: Event) -> None:
        federation.events.append(event)
        if event.name == "shared" and not restarted.is_set():
            restarted.set()
            federation.server.stop()
            federation.server.start()

    agents = [federation.agent(0, on_event=restart), *(federation.agent(number) for number in (1, 2))]
    task = federation.task(cohort=3)
    federation.run(agents, ended(federation, task))
    assert restarted.is_set()
    assert federation.wait(task).state == "completed"
    check_sum(federation, task, list(zip(agents, range(3))))


@pytest.mark.sampled(every=3)
def test_a_device_that_the_server_does_not_know_is_told(federation: Federation) -> None:
    agent = federation.agent(0)
    other = federation.agent(1, enrol=False)
    # Its identity is from another server with the same key, say one that lost its database.
    federation.server.stop()
    federation.server._services.database.dispose()
    for path in (federation.folder / "server").glob("archipel.db*"):
        path.unlink()
    federation.server._services.prepare()
    federation.server.start()
    with pytest.raises(RefusedError, match="not enrolled"):
        agent.run_forever(threading.Event())
    with pytest.raises(ClientError, match="not enrolled; call enrol"):
        other.run_once()


def test_phases_are_those_of_the_protocol() -> None:
    from typing import get_type_hints

    from archipel.client.rounds.exchange import ORDER

    assert get_type_hints(RoundStatus)["phase"].__args__ == ORDER


@pytest.mark.sampled(every=4)
def test_no_other_round_begins_before_the_result_of_one_that_it_counts_in(federation: Federation) -> None:
    """The first has confirmed and was stopped; its peers do not confirm, so that the round hangs until its deadline."""
    uploaded: list[str] = []

    def on_event(event: Event) -> None:
        federation.events.append(event)
        if event.name == "uploaded":
            uploaded.append(event.device_id)

    def conditions() -> bool:
        # Both go on until the other's update is there, too.
        return len(uploaded) < 2

    first = federation.agent(0)
    peers = [federation.agent(n, on_event=on_event, conditions=conditions, resume_within=30.0) for n in (1, 2)]
    task = federation.task(cohort=3, deadlines={"confirming": 3.0})
    stop = threading.Event()
    threads = [threading.Thread(target=peer.run_forever, args=(stop,)) for peer in peers]
    for thread in threads:
        thread.start()
    try:
        federation.run([first], lambda: "confirmed" in federation.names(first))
        assert first.rounds[0].step == "confirming"
        outcome = first.run_once()
        assert (outcome.kind, outcome.round_id) == ("waiting", first.rounds[0].round_id)
        assert outcome.reason == "the round's result is still to come"
        deadline = time.monotonic() + 10
        while first.rounds[0].step != "closed":
            assert time.monotonic() < deadline
            first.run_once()
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert first.rounds[0].result == "dropped"
    assert "the round failed" in first.rounds[0].reason
    assert federation.operator.tasks.get(task.task_id).failed_rounds == 1
