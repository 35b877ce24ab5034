"""Agents replace their keys, and are killed while they do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import generate_key, load_private_key, save_private_key
from archipel.client import Agent, Event
from archipel.client.connection.identity import RECORD_FILE, IdentityStore
from archipel.client.memory.keystore import DATA_KEY, DEVICE_KEY, NEXT_DEVICE_KEY
from archipel.errors import CertificateError, ClientError, RefusedError, UnreachableError
from archipel.protocol import messages
from archipel.protocol.sealed import public_bytes
from tests.support.faults import Forward, Handler, Proxy, running, status
from tests.support.federation import Federation


def key_of(agent: Agent, name: str = DEVICE_KEY) -> bytes:
    return public_bytes(load_private_key(agent.config.folder / name))


def rotations(federation: Federation, agent: Agent) -> int:
    """How often the server says that the device has replaced its key."""
    return int(federation.operator.devices.get(agent.device_id).rotations)


@pytest.mark.sampled(every=3)
def test_the_key_is_another_and_the_device_the_same(federation: Federation) -> None:
    agent = federation.agent(0)
    device_id, old = agent.device_id, key_of(agent)
    agent.run_once()
    assert agent.rotate_key()
    assert agent.run_once().kind == "waiting"
    assert (agent.device_id, rotations(federation, agent)) == (device_id, 1)
    assert key_of(agent) != old
    assert sorted(path.name for path in agent.config.folder.iterdir() if path.is_file()) == [
        DATA_KEY, RECORD_FILE, DEVICE_KEY, "lock",
    ]  # fmt: skip
    assert (agent.config.folder / DEVICE_KEY).stat().st_mode & 0o777 == 0o600
    assert [(event.name, event.detail) for event in federation.events if event.name == "rotated"] == [
        ("rotated", {"number": 1})
    ]
    agent.close()
    with Agent(agent.config, examples=dict) as again:
        assert again.device_id == device_id
        assert again.run_once().kind == "waiting"
        assert again.rotate_key()
        assert rotations(federation, again) == 2


@pytest.mark.sampled(every=4)
def test_a_round_with_agents_that_replaced_their_keys(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(4)]
    for agent in agents[1:3]:
        assert agent.rotate_key()
    task = federation.task(cohort=4)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    [info] = federation.rounds(task)
    assert set(info.survivors) == {agent.device_id for agent in agents}
    expected = federation.expected_weights(
        federation.operator.weights.read(info.weights_in)["w"], [(agent, n) for n, agent in enumerate(agents)], task
    )
    np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)


@pytest.mark.sampled(every=8)
def test_in_a_round_it_is_put_off_until_that_is_over(federation: Federation) -> None:
    agents = [federation.agent(number) for number in range(3)]
    asked: list[bool] = []

    def once(event: Event) -> None:
        federation.events.append(event)
        if event.name == "trained" and not asked:
            asked.append(agents[0].rotate_key())

    agents[0]._on_event = once
    task = federation.task(cohort=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    assert asked == [False]
    agents[0].run_once()
    assert rotations(federation, agents[0]) == 1
    assert not (agents[0].config.folder / NEXT_DEVICE_KEY).exists()


@pytest.mark.sampled(every=3)
def test_before_enrolment_and_as_often_as_it_can_be(federation: Federation) -> None:
    agent = federation.agent(0, enrol=False)
    with pytest.raises(ClientError, match="not enrolled"):
        agent.rotate_key()
    agent.enrol(federation.token())
    for _ in range(messages.MAX_ROTATIONS):
        assert agent.rotate_key()
    with pytest.raises(CertificateError, match="enrol again with a new token"):
        agent.rotate_key()
    assert agent.run_once().kind == "waiting"


@pytest.mark.sampled(every=3)
def test_an_unreachable_server_leaves_the_old_key_in_use_and_the_next_one_waiting(federation: Federation) -> None:
    agent = federation.agent(0)
    old = key_of(agent)
    federation.server.stop()
    with pytest.raises(UnreachableError):
        agent.rotate_key()
    federation.server.start()
    new = key_of(agent, NEXT_DEVICE_KEY)
    assert key_of(agent) == old
    # The next check-in goes on with that very key.
    assert agent.run_once().kind == "waiting"
    assert key_of(agent) == new
    assert rotations(federation, agent) == 1


@pytest.mark.sampled(every=3)
def test_a_revoked_device(federation: Federation) -> None:
    agent = federation.agent(0)
    federation.operator.devices.revoke(agent.device_id)
    for call in (agent.run_once, agent.rotate_key):
        with pytest.raises(RefusedError, match="was revoked"):
            call()
    with pytest.raises(RefusedError, match="was revoked"):
        agent.run_forever(threading.Event())


def test_a_key_that_is_not_the_records_is_not_used(federation: Federation) -> None:
    agent = federation.agent(0)
    agent.close()
    path: Path = agent.config.folder / DEVICE_KEY
    path.unlink()
    save_private_key(generate_key(), path)
    with pytest.raises(ClientError, match=r"device\.key is not the key in device\.json"):
        IdentityStore(agent.config.folder).record()


VICTIM = """
import json, os, signal, sys
from pathlib import Path
from archipel.client import Agent, AgentConfig
from archipel.client.connection import identity, transport
from archipel.client.memory import keystore

folder, point = json.loads(sys.argv[1])

def dies(owner, name, before=False, when=lambda *a, **k: True):
    kept = getattr(owner, name)
    def wrapped(*arguments, **options):
        if before and when(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        result = kept(*arguments, **options)
        if when(*arguments, **options):
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, wrapped)

sends = lambda self, method, path, *a, **k: method == "PUT" and path.endswith("/key")
writes = lambda path, *a, **k: Path(path).name == "device.json"
keeps = lambda self, name, *a, **k: name == "device.key"
next_one = lambda self, name, *a, **k: name == "device.key.next"
{
    "next key not made": lambda: dies(keystore.FileKeys, "store", True, next_one),
    "next key made": lambda: dies(keystore.FileKeys, "store", False, next_one),
    "request not sent": lambda: dies(transport.Transport, "call", True, sends),
    "answer not read": lambda: dies(transport.Transport, "call", False, sends),
    "record not written": lambda: dies(identity, "write_durably", True, writes),
    "record written": lambda: dies(identity, "write_durably", False, writes),
    "key not replaced": lambda: dies(keystore.FileKeys, "store", True, keeps),
    "key replaced": lambda: dies(keystore.FileKeys, "store", False, keeps),
    "next key not deleted": lambda: dies(keystore.FileKeys, "delete", True, next_one),
    "next key deleted": lambda: dies(keystore.FileKeys, "delete", False, next_one),
}[point]()
with Agent(AgentConfig(folder=Path(folder), backoff=0.02), examples=dict) as agent:
    agent.rotate_key()
"""
POINTS = {
    "next key not made": 0, "next key made": 1, "request not sent": 1, "answer not read": 1, "record not written": 1,
    "record written": 1, "key not replaced": 1, "key replaced": 1, "next key not deleted": 1, "next key deleted": 1,
}  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sampled(every=6)
def test_killed_at(federation: Federation, point: str) -> None:
    agent = federation.agent(0)
    agent.close()
    argument = json.dumps([str(agent.config.folder), point])
    done = subprocess.run([sys.executable, "-c", VICTIM, argument], check=False, timeout=30)
    assert done.returncode == -9
    with Agent(agent.config, examples=dict) as again:
        assert again.run_once().kind == "waiting"
        assert rotations(federation, again) == POINTS[point]
        assert again.rotate_key()
        assert again.run_once().kind == "waiting"
        assert rotations(federation, again) == POINTS[point] + 1
        assert not (agent.config.folder / NEXT_DEVICE_KEY).exists()
    assert not list(agent.config.folder.glob(".*.tmp"))


@pytest.mark.sampled(every=4)
def test_killed_again_and_again(federation: Federation) -> None:
    """Each time a step further, in one and the same rotation."""
    agent = federation.agent(0)
    agent.close()
    for point in ("next key made", "request not sent", "answer not read", "record not written", "key replaced"):
        argument = json.dumps([str(agent.config.folder), point])
        done = subprocess.run([sys.executable, "-c", VICTIM, argument], check=False, timeout=30)
        assert done.returncode == -9
    with Agent(agent.config, examples=dict) as again:
        assert again.run_once().kind == "waiting"
        assert rotations(federation, again) == 1


@pytest.mark.sampled(every=3)
def test_a_request_that_is_delivered_long_after_its_answer_was_given_up(federation: Federation) -> None:
    """The server answers to the next key from one moment to the next, while the device goes on with the old one."""
    late: list[Forward] = []

    def hold(handler: Handler, forward: Forward) -> None:
        late.append(forward)
        status(409)(handler, forward)

    def deliver(handler: Handler, forward: Forward) -> None:
        late.pop()()
        handler.answer(*forward())

    def fault(method: str, path: str) -> Callable[[Handler, Forward], None] | None:
        if path.endswith("/key") and len(held) < 2:
            held.append(path)
            return hold
        return deliver if path == "/v1/check-ins" and len(held) == 2 and late else None

    held: list[str] = []
    with running(Proxy(federation.server.port)) as proxy:
        agent = federation.agent(0, server=proxy.url)
        proxy.fault = fault
        assert not agent.rotate_key()
        new = key_of(agent, NEXT_DEVICE_KEY)
        late.clear()
        assert agent.run_once().kind == "waiting"
        assert (key_of(agent), rotations(federation, agent)) == (new, 1)
        assert agent.run_once().kind == "waiting"
