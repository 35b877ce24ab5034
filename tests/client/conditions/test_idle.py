"""The load of others, for each core."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from archipel.client.conditions.probes.device import Idle
from archipel.client.conditions.probes.own_load import OwnLoad, own_cpu_seconds
from archipel.errors import ClientError

Tree = Callable[..., Path]


def machine(load: str, cores: str = "0-3") -> dict[str, str]:
    return {"proc/loadavg": f"{load} 9.00 9.00 2/345 6789", "sys/devices/system/cpu/online": cores}


@pytest.mark.parametrize(
    ("load", "cores", "own", "busy"),
    [
        ("0.00", "0", 0.0, 0.0),
        ("2.00", "0-3", 0.0, 0.5),
        ("2.00", "0-1,4,6-7", 0.0, 0.4),
        ("2.00", "0-3", 1.0, 0.25),
        ("0.50", "0", 0.9, 0.0),  # never below none
        ("12.25", "0", 0.25, 12.0),
    ],
)
def test_load_for_each_core(tree: Tree, load: str, cores: str, own: float, busy: float) -> None:
    root = tree(machine(load, cores))
    probe = Idle(busy + 0.01, root, own=lambda: own)
    assert probe.value() == busy
    assert probe.why_not() == ""
    if busy:
        reason = f"busy: {busy:.2f} threads for each core, not below {busy:g} (setting idle)"
        assert Idle(busy, root, own=lambda: own).why_not() == reason


def test_work_does_not_stop_itself_but_that_of_others_does(tree: Tree) -> None:
    """One core, 20 minutes of work, then somebody else's program beside it; the kernel's load after sched/loadavg.h."""
    now, own_cpu, load = 0.0, 0.0, 0.0
    probe = Idle(0.5, tree(machine("0.00", "0")), own=OwnLoad(lambda: own_cpu, lambda: now))
    answers: list[tuple[float, str]] = []
    working = True
    for _ in range(360):
        now += 5
        others = 1 if now > 1200 else 0
        load = load * math.exp(-5 / 60) + (working + others) * (1 - math.exp(-5 / 60))
        tree({"proc/loadavg": f"{load:.2f} 9.00 9.00 2/345 6789"})
        own_cpu += 5 * working / (1 + others)
        answers.append((now, probe.why_not()))
        working = not answers[-1][1]
    assert not [moment for moment, reason in answers if reason and moment <= 1200]
    stopped = [moment for moment, reason in answers if reason]
    assert 1200 < stopped[0] <= 1200 + 90
    assert stopped[-1] == now
    assert len(stopped) == len([moment for moment, _ in answers if moment >= stopped[0]])  # and it stays stopped


def test_it_is_asked_for_cpu_time_every_five_seconds_at_most() -> None:
    now, asked = 100.0, 0

    def cpu() -> float:
        nonlocal asked
        asked += 1
        return float(asked)

    own = OwnLoad(cpu, lambda: now)
    for _ in range(400):
        own()
        now += 0.25
    assert asked == 20


BUSY = """import time
end = time.process_time() + 1.0
while time.process_time() < end:
    pass
print("x", flush=True)
input()
"""


@pytest.mark.sampled(every=4)
def test_cpu_time_of_this_process_and_its_children() -> None:
    def by_psutil() -> float:
        own = psutil.Process()
        children = [child.cpu_times() for child in own.children()]
        return sum(own.cpu_times()[:4]) + sum(times.user + times.system for times in children)

    before = own_cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        running = own_cpu_seconds()
        assert running - before >= 0.9
        assert abs(running - by_psutil()) < 0.2
        child.communicate("\n")
    ended = own_cpu_seconds()
    assert -0.05 < ended - running < 0.5  # what it used is not lost with it
    assert abs(ended - by_psutil()) < 0.2


def test_this_machine() -> None:
    for _ in range(5):  # it changes every five seconds
        expected = psutil.getloadavg()[0] / psutil.cpu_count()
        if abs(Idle(1, own=lambda: 0.0).value() - expected) <= 0.011 / psutil.cpu_count():
            break
        time.sleep(0.01)
    else:
        pytest.fail("not the load that psutil says")
    assert Idle(1).value() >= 0


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("proc/loadavg", ""),
        ("proc/loadavg", "0.10"),
        ("proc/loadavg", "nan 0.10 0.10 1/2 3"),
        ("proc/loadavg", "-1.00 0.10 0.10 1/2 3"),
        ("sys/devices/system/cpu/online", ""),
        ("sys/devices/system/cpu/online", "3-0"),
        ("sys/devices/system/cpu/online", "0-"),
        ("sys/devices/system/cpu/online", "all"),
    ],
)
def test_files_that_cannot_be_right(tree: Tree, file: str, content: str) -> None:
    with pytest.raises(ClientError, match=f"{file} has .* where (loads|cores) are expected"):
        Idle(1, tree({**machine("0.10"), file: content})).why_not()


@pytest.mark.parametrize("wrong", [0, -0.5, 101, "half", True])
def test_what_is_no_share(wrong: object) -> None:
    with pytest.raises(
        ClientError, match="idle must be a number of busy threads for each core above 0 and at most 100"
    ):
        Idle(wrong)  # type: ignore[arg-type]
