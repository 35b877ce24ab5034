"""A server counts the adoption of a version that only one device has decided about.

Who: the server, which may offer a version to one device of a cohort and withhold it from the others, and may ask as
often as the policy allows. What they want: whether that device took the version, which is one bit about its examples.
The secure sum does not hide it, since the server knows what the others add: nothing. What stops them: the device's
answer is noisy before it enters the sum, true with a probability of 3/4; it is drawn once for each version, by its
content, so that asking again gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from archipel.bundle import open_bundle
from archipel.client import Agent
from archipel.client.memory import decisions
from archipel.client.memory.decisions import MAX_DECISIONS, DecisionBook, content_key
from archipel.errors import PolicyError, RefusedError
from archipel.protocol.messages import RoundPlan
from archipel.protocol.operator.results import RoundResult
from archipel.protocol.policy import check_plan
from archipel.protocol.sealed import public_bytes
from archipel.protocol.uploads import DECIDED, TOOK, upload_layout
from tests.support.federation import Federation
from tests.support.fixtures.federation import *  # noqa: F403
from tests.support.registry import BETTER, MODEL, WORSE, Registry

VERSION = content_key("a" * 64, None)
DEVICES = 400


@pytest.fixture
def registry(federation: Federation) -> Registry:
    made = Registry(federation, {})
    made.add((0.1, 0.2, 0.3))
    return made


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The random numbers that devices draw, in turn: 0 makes an answer untrue. Any other draw fails."""
    drawn: list[int] = []

    def draw(taken: bool) -> bool:
        return taken if drawn.pop(0) else not taken

    monkeypatch.setattr(decisions, "draw_answer", draw)
    yield drawn
    assert not drawn


def ask(registry: Registry, agents: list[Agent], number: int) -> RoundResult:
    """Evaluate a version and count its adoption. The bundle of this test allows sums of one contributor."""
    operator = registry.federation.operator
    version = operator.models.version(MODEL, number)
    size = len(agents)
    task = registry.federation.task(
        bundle=version.bundle, kind="evaluation", metrics={"loss": 64.0}, count_adoption=True, threshold=None,
        min_cohort=size, cohort=size,
    )  # fmt: skip
    registry.federation.run(agents, lambda: operator.tasks.get(task.task_id).state != "running")
    [info] = registry.federation.rounds(task)
    assert info.phase == "committed", info
    assert info.result is not None
    return info.result


@pytest.mark.parametrize("w", [BETTER, WORSE])
@pytest.mark.sampled(every=4)
def test_the_sum_holds_an_answer_that_may_be_untrue(
    registry: Registry, answers: list[int], w: tuple[float, ...]
) -> None:
    """One device alone is offered version 2; its answer is drawn untrue, so that the server concludes the opposite."""
    victim = registry.device(0)
    others = [registry.federation.agent(number, allow_plain=True) for number in (1, 2)]  # adopt=False: never offered
    answers += [1, 0]
    victim.run_once()
    registry.add(w)
    victim.run_once()
    took = victim.models == {MODEL: 2}
    assert took == (w == BETTER)
    adoption = ask(registry, [victim, *others], 2).adoption
    assert adoption is not None
    # An estimate from one answer is 2 - 1/2 or 0 - 1/2, kept from 0 to 1: the server has the answer, not the truth.
    assert (adoption.decided, adoption.taken) == (1, float(not took))
    victim.close()
    again = registry.federation.agent(0, enrol=False, adopt=True, allow_plain=True)
    assert ask(registry, [again, *others], 2).adoption == adoption


def test_a_guess_is_right_three_times_in_four_however_often_it_is_asked(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    right = 0
    for number in range(DEVICES):
        folder = tmp_path / str(number)
        folder.mkdir()
        taken = bool(rng.integers(2))
        book = DecisionBook(folder)
        book.record(VERSION, taken)
        asked = []
        for again in range(3):
            asked.append(DecisionBook(folder).answer(VERSION))
            # What the device decides later, under another number or after it gave the version up, draws nothing anew.
            book.record(VERSION, bool(again % 2))
        assert len(set(asked)) == 1
        right += asked[0] == taken
    # Binomial with p = 3/4: five standard deviations.
    assert abs(right / DEVICES - 0.75) < 5 * (0.75 * 0.25 / DEVICES) ** 0.5


@pytest.mark.sampled(every=4)
def test_a_device_that_has_not_decided_adds_nothing(registry: Registry, answers: list[int]) -> None:
    agents = [registry.federation.agent(0, allow_plain=True), registry.device(1, count_adoption=False)]
    answers += [1]
    agents[1].run_once()
    result = ask(registry, agents, 1)
    assert (result.devices, result.contributors, result.adoption) == (2, 2, None)


@pytest.mark.sampled(every=4)
def test_answers_are_not_forgotten_to_be_drawn_again(tmp_path: Path) -> None:
    book = DecisionBook(tmp_path)
    keys = [content_key(f"{number:064x}", None) for number in range(MAX_DECISIONS + 3)]
    first = {}
    for key in keys:
        book.record(key, True)
        first[key] = book.answer(key)
    assert [key for key in keys if first[key] is None] == keys[MAX_DECISIONS:]
    assert {key: book.answer(key) for key in keys} == first


@pytest.mark.sampled(every=3)
def test_adoption_is_counted_in_secure_evaluations_only(registry: Registry) -> None:
    operator = registry.federation.operator
    version = operator.models.version(MODEL, 1)
    for changes, words in (
        (
            {"kind": "evaluation", "metrics": {"loss": 64.0}, "privacy": "plain", "threshold": None},
            "secure evaluations",
        ),
        ({"kind": "training"}, "belongs to tasks of kind evaluation"),
    ):
        with pytest.raises(RefusedError, match=words):
            registry.federation.task(bundle=version.bundle, count_adoption=True, **changes)
    # A server that asks all the same is refused by the device.
    [file] = registry.federation.folder.glob(f"{MODEL}-*.bundle")
    manifest = open_bundle(file, [public_bytes(registry.federation.publisher_key)]).manifest
    metrics = {"loss": 64.0}
    layout = upload_layout(manifest, "evaluation", "", metrics, count_adoption=True)
    assert {port.name for port in layout.updates} >= {DECIDED, TOOK}
    asked = RoundPlan(
        round_id="0" * 32, task_id="1" * 32, number=1, bundle="a" * 64, weights="b" * 64, privacy="plain",
        min_cohort=3, max_cohort=3, threshold=1, modulus_bits=32, kind="evaluation", metrics=metrics,
        min_contributors=1, count_adoption=True,
    )  # fmt: skip
    with pytest.raises(PolicyError, match="adoption is counted in secure evaluations only"):
        check_plan(asked, manifest.privacy, layout)
