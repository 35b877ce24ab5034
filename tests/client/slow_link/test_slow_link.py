"""A model goes down and an update up through a link that breaks again and again: neither begins from zero again.

The link is a proxy that counts bytes. A link of the kernel that loses packets is in tests/edge/test_partition.py: not
every kernel has the network emulator (tc netem), so that one is made of a token bucket and the packet filter. With
`ARCHIPEL_HOURS=1 pytest -m slow tests/client/slow_link` the model has 100 MB, over 1 Mbit a second; that takes an hour.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel.bundle import PrivacyPolicy, pack
from archipel.converter import Signing, Training, convert
from archipel.training import losses, optimizers
from tests.client.slow_link.wire import BreaksOnce, Wire
from tests.support.federation import Federation
from tests.support.in_thread import in_thread

MBIT = 1_000_000 / 8
HOURS = [
    pytest.mark.slow,
    pytest.mark.skipif("ARCHIPEL_HOURS" not in os.environ, reason="takes an hour; set ARCHIPEL_HOURS=1"),
]
LARGE: dict[str, Any] = {
    "max_cache_bytes": 1 << 30,
    "max_download_bytes": 1 << 30,
    "max_upload_bytes": 1 << 30,
    "max_upload_entries": 1 << 26,
    "max_peak_bytes": 8 << 30,
}
PHASES = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking")


def publish(federation: Federation, inputs: int) -> int:
    """A linear model of `inputs` x 1,000 weights; its bytes."""
    torch.manual_seed(0)
    made = convert(
        nn.Linear(inputs, 1000, bias=False), federation.folder / "net", example=torch.zeros(2, inputs),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), batch_size=4),
        privacy=PrivacyPolicy(
            modes=("secure",), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=20, colluders=0.0,
        ),
        signing=Signing(federation.publisher_key),
    )  # fmt: skip
    federation.bundle_file = federation.folder / "net.bundle"
    pack(federation.folder / "net", federation.bundle_file)
    assert made.program("predict").inputs[0].name
    return federation.bundle_file.stat().st_size


def data(number: int, inputs: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    return {"input": rng.standard_normal((4, inputs), np.float32), "label": rng.integers(0, 1000, 4)}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize(
    ("inputs", "rate"),
    [(4_000, 200 * MBIT), pytest.param(25_000, MBIT, marks=HOURS)],
    ids=["16 MB", "100 MB at 1 Mbit a second"],
)
def test_both_ways_go_on_after_every_cut(federation: Federation, inputs: int, rate: float) -> None:
    size = publish(federation, inputs)
    slow = rate < 2 * MBIT

    # The defaults of a device but for these, as nobody waits for so long for a test.
    patient = {"patience": 120.0, "attempts": 4, "request_timeout": 7200.0, "round_timeout": 7200.0, **LARGE}
    with in_thread(Wire(federation.server.port, rate, 0.02, seed=1)) as wire:
        agents = [
            federation.agent(number, server=wire.url if number == 0 else federation.url,
                             examples=lambda number=number: data(number, inputs), **patient)
            for number in range(3)
        ]  # fmt: skip
        wire.passed.clear()
        wire.cuts.clear()
        deadlines = dict.fromkeys(PHASES, 3600.0 if slow else 120.0)
        task = federation.task(cohort=3, deadlines=deadlines)
        ended = lambda: federation.operator.tasks.get(task.task_id).state != "running"  # noqa: E731
        federation.run(agents, ended, timeout=7200 if slow else 240)
        passed, cuts = dict(wire.passed), dict(wire.cuts)
    assert [(each.phase, len(each.survivors), each.reason) for each in federation.rounds(task)] == [
        ("committed", 3, "")
    ]
    [update, *_] = {int(event.detail["bytes"]) for event in federation.events if event.name == "uploaded"}
    print({way: (f"{passed[way] / least:.2f}", cuts[way]) for way, least in (("down", size), ("up", update))})
    assert min(cuts.values()) >= 3
    # Of a part that is cut, half is lost on average; of a download nothing but what was under way.
    assert size < passed["down"] < 1.3 * size
    assert update < passed["up"] < 1.6 * update


@pytest.mark.sampled(every=3)
def test_an_upload_that_takes_longer_than_the_patience_is_no_silence(federation: Federation) -> None:
    publish(federation, 3_200)
    # Of 9 parts of an update the eighth breaks, 1.5 s after the first began; the seventh came 0.2 s before.
    least = 7.5 * (1 << 20)
    with in_thread(BreaksOnce(federation.server.port, 5e6, int(least))) as wire:
        slow = {"server": wire.url, "patience": 0.8, "attempts": 1}
        agents = [
            federation.agent(number, examples=lambda number=number: data(number, 3_200), **LARGE,
                             **(slow if number == 0 else {}))
            for number in range(3)
        ]  # fmt: skip
        task = federation.task(cohort=3, deadlines=dict.fromkeys(PHASES, 30.0))
        ended = lambda: federation.operator.tasks.get(task.task_id).state != "running"  # noqa: E731
        federation.run(agents, ended, timeout=120)
        assert wire.cuts == {"up": 1}
    assert [(each.phase, len(each.survivors), each.reason) for each in federation.rounds(task)] == [
        ("committed", 3, "")
    ]
