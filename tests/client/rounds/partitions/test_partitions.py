"""A device's cable is cut in each phase of a round, in several ways; mended, it comes back, and sums are right."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.client import Agent, Event
from archipel.protocol.operator.tasks import RoundInfo, TaskInfo
from tests.client.rounds.partitions.namespaces import Namespace, Network, UnsupportedError
from tests.support.federation import Federation

WAYS = ("down", "far end down", "silent", "requests lost", "answers lost")
EVENTS = ("assigned", "trained", "advertised", "shared", "masked", "uploaded", "confirmed", "unmasked")
"""The cable is cut when the device tells this."""
PATIENT = {"connect_timeout": 0.4, "read_timeout": 0.4, "request_timeout": 2.0, "patience": 4.0, "attempts": 2}
PHASES = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


class Devices:
    """Four agents; the first is alone on its cable."""

    def __init__(self, federation: Federation, network: Network, **config: Any) -> None:
        self.federation, self.network = federation, network
        self.told: Callable[[Event], None] = lambda event: None
        self.agents = []
        for number, (namespace, cable) in enumerate(
            [(network.alone, network.cable), *[(network.others, network.other_cable)] * 3]
        ):
            server = f"http://{cable.address}:{federation.server.port}"
            on_event = {"on_event": self._tell} if number == 0 else {}
            with namespace.entered():
                self.agents.append(
                    federation.agent(number, server=server, allow_http=True, **on_event, **{**PATIENT, **config})
                )

    @property
    def alone(self) -> Agent:
        return self.agents[0]

    def _tell(self, event: Event) -> None:
        self.federation.events.append(event)
        self.told(event)

    @contextmanager
    def running(self) -> Iterator[None]:
        stop, errors = threading.Event(), list[BaseException]()

        def work(agent: Agent, namespace: Namespace) -> None:
            try:
                namespace.enter()
                agent.run_forever(stop)
            except BaseException as error:  # noqa: BLE001 - raised by the main thread
                errors.append(error)

        network = self.network
        threads = [
            threading.Thread(target=work, args=(agent, network.others if number else network.alone))
            for number, agent in enumerate(self.agents)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def cut_at(self, event: str, way: str) -> threading.Event:
        """Set once the cable was cut."""
        cut = threading.Event()

        def told(happened: Event) -> None:
            if happened.name == event and not cut.is_set():
                self.network.cable.cut(way)
                cut.set()

        self.told = told
        return cut

    def wait_until(self, what: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, [self.federation.names(agent) for agent in self.agents]
            time.sleep(0.02)

    def check_sum(self, info: RoundInfo, task: TaskInfo) -> None:
        federation = self.federation
        survivors = [(agent, n) for n, agent in enumerate(self.agents) if agent.device_id in info.survivors]
        expected = federation.expected_weights(federation.operator.weights.read(info.weights_in)["w"], survivors, task)
        np.testing.assert_allclose(federation.operator.weights.read(info.weights_out)["w"], expected, rtol=1e-6)

    def clean_round(self) -> None:
        """With all of them, as if nothing had been."""
        task = self.federation.task(name="clean", cohort=4, min_cohort=4)
        self.wait_until(lambda: self.federation.operator.tasks.get(task.task_id).state == "completed", 15)
        [info] = [each for each in self.federation.rounds(task) if each.phase == "committed"]
        self.wait_until(lambda: self.settled, 5)
        assert self.alone.rounds[-1].result == "took_part"
        self.check_sum(info, task)

    @property
    def settled(self) -> bool:
        return all(entry.step == "closed" for entry in self.alone.rounds)


def cases(*quick: tuple[str, str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("way", "event"),
        [
            pytest.param(way, event, marks=[] if (way, event) in quick else pytest.mark.slow)
            for way in WAYS
            for event in EVENTS
        ],
    )


@cases(("down", "trained"), ("answers lost", "masked"))
@pytest.mark.sampled(every=8)
def test_a_cable_that_is_mended_within_the_phase(
    federation: Federation, network: Network, way: str, event: str
) -> None:
    """The round goes on with all of them, and the update of each is in the sum once."""
    devices = Devices(federation, network)
    task = federation.task(cohort=4, min_cohort=4, deadlines=dict.fromkeys(PHASES, 10.0))
    cut = devices.cut_at(event, way)
    with devices.running():
        devices.wait_until(cut.is_set, 15)
        time.sleep(0.8)
        network.cable.mend()
        devices.wait_until(lambda: federation.operator.tasks.get(task.task_id).state != "running", 30)
        devices.wait_until(lambda: devices.alone.rounds and devices.settled, 5)
    [info] = [each for each in federation.rounds(task) if each.phase == "committed"]
    assert len(info.survivors) == 4
    devices.check_sum(info, task)
    assert devices.alone.rounds[-1].result == "took_part"


@cases(("answers lost", "confirmed"))
@pytest.mark.sampled(every=8)
def test_a_cable_that_is_mended_when_the_round_is_over(
    federation: Federation, network: Network, way: str, event: str
) -> None:
    """The others end the round without the device, or with its update; it comes back in time and takes part again."""
    devices = Devices(federation, network, patience=1.0)
    task = federation.task(cohort=4, min_cohort=3, deadlines=dict.fromkeys(PHASES, 1.5))
    cut = devices.cut_at(event, way)
    with devices.running():
        devices.wait_until(cut.is_set, 15)
        devices.wait_until(lambda: federation.operator.tasks.get(task.task_id).state != "running", 30)
        [info] = [each for each in federation.rounds(task) if each.phase == "committed"]
        devices.check_sum(info, task)
        network.cable.mend()
        mended = time.monotonic()
        devices.wait_until(lambda: devices.settled, 5)
        # The waits while it was cut off grew, to `max_offline_wait` at most.
        assert time.monotonic() - mended < 5
        [entry] = devices.alone.rounds
        assert entry.result in ("took_part", "dropped")
        assert entry.result == "dropped" or devices.alone.device_id in info.survivors
        # It remembers exactly what it knows to have counted.
        states = federation.states(devices.alone.config.folder)
        assert [float(kept.state["seen"]) for kept in states] == ([4.0] if entry.result == "took_part" else [])
        devices.clean_round()


@pytest.mark.parametrize("what", ["netem delay 60ms 20ms loss 8%", "tbf rate 256kbit burst 4kb latency 400ms"])
@pytest.mark.sampled(every=4)
def test_a_bad_line(federation: Federation, network: Network, what: str) -> None:
    try:
        network.cable.spoil(*what.split())
    except UnsupportedError as error:
        pytest.skip(str(error))
    devices = Devices(federation, network, connect_timeout=3.0, read_timeout=3.0, patience=20.0)
    with devices.running():
        devices.clean_round()


@pytest.mark.sampled(every=8)
def test_the_server_is_away_for_everybody(federation: Federation, network: Network) -> None:
    """Both cables are cut in the middle of a round, which fails; afterwards all of them take part again."""
    devices = Devices(federation, network, patience=0.5)
    federation.task(cohort=4, min_cohort=3, deadlines=dict.fromkeys(PHASES, 1.0))
    cut = devices.cut_at("shared", "silent")
    with devices.running():
        devices.wait_until(cut.is_set, 15)
        network.other_cable.cut("silent")
        time.sleep(2.0)
        for cable in (network.cable, network.other_cable):
            cable.mend()
        devices.wait_until(lambda: devices.settled, 5)
        for task in federation.operator.tasks.list():
            federation.operator.tasks.cancel(task.task_id)
        devices.clean_round()


def test_nothing_is_left_behind(network: Network) -> None:
    inside = network.alone
    name = os.readlink(f"/proc/self/fd/{inside.file}")
    with pytest.raises(UnsupportedError, match="no-such-device"):
        inside.run("ip", "link", "show", "no-such-device")
    assert os.readlink("/proc/thread-self/ns/net") != name
    inside.close()
    holders = [path for path in Path("/proc").glob("[0-9]*/task/*/ns/net") if _target(path) == name]
    holders += [path for path in Path("/proc").glob("[0-9]*/fd/*") if _target(path) == name]
    inside.file = os.open("/dev/null", os.O_RDONLY)  # for the fixture to close
    assert not holders


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
