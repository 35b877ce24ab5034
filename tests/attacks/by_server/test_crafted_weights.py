"""An active server sends weights that it made itself, so that one secure sum tells single examples.

In a layer whose weights and biases are chosen well a neuron answers to one example of the whole cohort, and its
gradient is that example ("trap weights"). The server needs weights that no training would give. Devices take only the
weights of the signed bundle, or those that rounds which took place can have made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from archipel.bundle import Bundle, PrivacyPolicy, pack, write_weights
from archipel.client import Agent
from archipel.errors import RefusedError
from archipel.protocol.messages import Endorsement, WeightsStatement
from archipel.protocol.operator.tasks import TaskInfo
from archipel.protocol.provenance import entry_hash
from archipel.protocol.sealed import Sealed, decode, encode, seal
from archipel.server.database.tables import Blob, Task, WeightsEntry
from archipel.server.http.api import tasks as api_tasks
from archipel.server.rounds.reach import extend
from archipel.server.services import Services
from tests.support.federation import Federation
from tests.support.fixtures.federation import federation as federation
from tests.support.fixtures.federation import server_host as server_host
from tests.support.fixtures.strategies import make as make
from tests.support.simulation import clients

Attack = Callable[[Services, Session, Task], None]
SCAFFOLD = PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.6, max_clip=2.0, max_bits=24, colluders=0.0)
TRAP = np.array([300.0, -300.0, 300.0], np.float32)


def store(services: Services, session: Session, task: Task) -> str:
    """The trap, where devices of the task may fetch it."""
    digest = services.blobs.put(write_weights({"w": TRAP}))
    session.merge(Blob(digest=digest, kind="weights", size=100, created=0.0))
    extend(session, task.population, task.task_id, digest)
    return str(digest)


def entries(session: Session) -> list[WeightsEntry]:
    return list(session.scalars(select(WeightsEntry).order_by(WeightsEntry.number)))


def rewrite(services: Services, session: Session, row: WeightsEntry, **changes: Any) -> None:
    """Sign entry `row` anew with these fields changed, as the server's owner can."""
    import msgspec

    statement = decode("weights", decode("weights", row.statement, Sealed).body, WeightsStatement)
    sealed = seal("weights", msgspec.structs.replace(statement, **changes), services.settings.private_key)
    row.statement, row.hash = encode(sealed), entry_hash(sealed)
    row.weights = changes.get("weights", row.weights)
    session.flush()


def only_the_model(services: Services, session: Session, task: Task) -> None:
    """The next plan names the trap; the log says nothing of it."""
    task.model = store(services, session, task)


def a_step_without_a_round(services: Services, session: Session, task: Task) -> None:
    """A further entry, signed by the server, of a round that never was."""
    last = entries(session)[-1]
    copy = WeightsEntry(
        population=last.population, bundle=last.bundle, number=last.number + 1, kind="step", weights="", hash="",
        statement=last.statement, evidence=last.evidence,
    )  # fmt: skip
    digest = store(services, session, task)
    rewrite(
        services, session, copy, number=last.number + 1, previous=last.hash, parent=last.weights, weights=digest,
        round_id="f" * 32,
    )  # fmt: skip
    session.add(copy)
    task.model = digest


def another_step_of_the_round(services: Services, session: Session, task: Task) -> None:
    """The round that was makes a second step, from the same parent."""
    last = entries(session)[-1]
    copy = WeightsEntry(
        population=last.population, bundle=last.bundle, number=last.number + 1, kind="step", weights="", hash="",
        statement=last.statement, evidence=last.evidence,
    )  # fmt: skip
    digest = store(services, session, task)
    rewrite(services, session, copy, number=last.number + 1, previous=last.hash, weights=digest)
    session.add(copy)
    task.model = digest


def a_lie_about_the_step(services: Services, session: Session, task: Task) -> None:
    """The round that was, with its genuine evidence, is said to have led to the trap."""
    digest = store(services, session, task)
    rewrite(services, session, entries(session)[-1], weights=digest)
    task.model = digest


def a_start_elsewhere(services: Services, session: Session, task: Task) -> None:
    """The training is said to have begun with the trap."""
    digest = store(services, session, task)
    first, *others = entries(session)
    for row in others:
        session.execute(delete(WeightsEntry).where(WeightsEntry.number == row.number))
    rewrite(services, session, first, weights=digest)
    task.model = digest


def too_few_signatures(services: Services, session: Session, task: Task) -> None:
    """The evidence lacks one signature of those that the threshold asks for."""
    import msgspec

    last = entries(session)[-1]
    found = decode("endorsement", last.evidence or b"", Endorsement)
    last.evidence = encode(msgspec.structs.replace(found, endorsers=found.endorsers[:-1]))


def another_past(services: Services, session: Session, task: Task) -> None:
    """The last entry, genuine in all else, follows another one than devices have seen."""
    rewrite(services, session, entries(session)[-1], previous="f" * 64)


def back_to_the_start(services: Services, session: Session, task: Task) -> None:
    """The next plan names weights that are in the log, but older than those that devices have trained with."""
    task.model = entries(session)[0].weights


def forgotten_entries(services: Services, session: Session, task: Task) -> None:
    """The log ends before what a device has seen, and goes on with the trap from the start."""
    digest = store(services, session, task)
    for row in entries(session)[1:]:
        session.execute(delete(WeightsEntry).where(WeightsEntry.number == row.number))
    task.model = digest


ATTACKS: dict[Attack, str] = {
    only_the_model: "not in the server's log",
    a_step_without_a_round: "another round",
    another_step_of_the_round: "has made a step already",
    a_lie_about_the_step: "away from weights that this device knows",
    a_start_elsewhere: "the server has lost a part of it",
    too_few_signatures: "3 are needed",
    another_past: "does not follow the entries that this device has seen",
    back_to_the_start: "older than entry 2, which this device has used",
    forgotten_entries: "the server has lost a part of it",
}


def trained_twice(federation: Federation, agents: list[Agent]) -> TaskInfo:
    """A task of which two rounds were committed, and no third is opened."""
    task = federation.task(rounds=4, cohort=3)

    def two_rounds() -> bool:
        found = federation.operator.tasks.get(task.task_id)
        if found.state == "running" and any(each.number == 2 for each in federation.rounds(task)):
            federation.operator.tasks.pause(task.task_id)  # it finishes its round, and opens no other
        return bool(found.rounds_committed >= 2)

    federation.run(agents, two_rounds)
    return task


def all_refuse(federation: Federation, task: TaskInfo, reasons: dict[Agent, str]) -> None:
    """Go on with the task: each of these agents refuses its next round for that reason, and none computes anything."""
    federation.events.clear()
    if federation.operator.tasks.get(task.task_id).state == "paused":
        federation.operator.tasks.resume(task.task_id)
    wanted = {agent.device_id: reason for agent, reason in reasons.items()}

    def names() -> set[str]:
        return {event.name for event in list(federation.events)}

    def refused() -> set[str]:
        said = [(e.device_id, str(e.detail)) for e in list(federation.events) if e.name == "refused"]
        return {device for device, detail in said if wanted[device] in detail}

    def done() -> bool:
        # A round ends with the first devices that leave it, so that the others refuse the next one.
        federation.end_rests()
        return refused() == set(wanted) or "trained" in names()

    federation.run(list(reasons), done, timeout=20)
    assert "trained" not in names()
    federation.operator.tasks.cancel(task.task_id)


def attacked(federation: Federation, task: TaskInfo, attack: Attack) -> None:
    services = federation.server._services
    with services.database.write() as session:
        attack(services, session, session.get_one(Task, task.task_id))


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_devices_refuse_weights_that_no_round_has_made(federation: Federation, attack: Attack) -> None:
    agents = [federation.agent(number) for number in range(3)]
    task = trained_twice(federation, agents)
    attacked(federation, task, attack)
    all_refuse(federation, task, dict.fromkeys(agents, ATTACKS[attack]))


FROM_THE_BUNDLE: dict[Attack, str] = {
    a_start_elsewhere: "a training starts with the bundle's own weights",
    a_lie_about_the_step: "away from weights that this device knows, where 3 rounds",
    too_few_signatures: "3 are needed",
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("attack", FROM_THE_BUNDLE, ids=lambda attack: attack.__name__)
def test_a_device_that_comes_new_refuses_as_well(federation: Federation, attack: Attack) -> None:
    """It has seen no weights but those that its publisher signed, and reads the log from its start."""
    agents = [federation.agent(number) for number in range(3)]
    task = trained_twice(federation, agents)
    attacked(federation, task, attack)
    newcomers = [federation.agent(number) for number in (3, 4, 5)]
    all_refuse(federation, task, dict.fromkeys(newcomers, FROM_THE_BUNDLE[attack]))


@pytest.mark.sampled(every=4)
def test_what_is_broadcast_beside_the_weights_is_bounded_too(
    federation: Federation, make: Callable[..., Bundle], tmp_path: Path
) -> None:
    """SCAFFOLD's control moves the weights with every local step: genuine weights and a crafted control would do."""
    bundle = make("scaffold", key=federation.publisher_key, privacy=SCAFFOLD, strategy_options={"clip": 2.0})
    federation.bundle_file = tmp_path / "scaffold.bundle"
    pack(bundle.folder, federation.bundle_file)
    field = bundle.program("predict").inputs[0].name
    agents = [
        federation.agent(number, examples=lambda x=x, y=y: {field: x, "label": y})
        for number, (x, y) in enumerate(clients()[:3])
    ]
    task = trained_twice(federation, agents)  # with the control that honest rounds make

    def craft(services: Services, session: Session, row: Task) -> None:
        control = services.blobs.read_weights(row.strategy_state)
        first = next(iter(control))
        data = write_weights({**control, first: np.full_like(control[first], 300.0)})
        row.strategy_state = services.blobs.put(data)
        session.merge(Blob(digest=row.strategy_state, kind="state", size=len(data), created=0.0))

    attacked(federation, task, craft)
    all_refuse(federation, task, dict.fromkeys(agents, "what is broadcast with the weights"))


@pytest.mark.sampled(every=8)
def test_nothing_is_evaluated_with_them_either(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss on crafted weights tells of examples, too. Neither an analyst nor the server gets one."""
    agents = [federation.agent(number) for number in range(3)]
    trained = trained_twice(federation, agents)
    services = federation.server._services
    with services.database.write() as session:
        trap = store(services, session, session.get_one(Task, trained.task_id))
    federation.operator.tasks.cancel(trained.task_id)
    question = {"kind": "evaluation", "metrics": {"mse": 10.0}, "cohort": 3, "bundle": trained.bundle}
    with pytest.raises(RefusedError, match=f"no weights {trap} in the log of this bundle"):
        federation.task(**question, weights=trap)
    monkeypatch.setattr(api_tasks, "is_logged", lambda *arguments: True)  # a server that does not look
    task = federation.task(**question, weights=trap)
    all_refuse(federation, task, dict.fromkeys(agents, "not in the server's log"))
