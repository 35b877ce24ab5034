"""A device that is killed anywhere in its round goes on, and never says two different things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from archipel.errors import ConsistencyError, MessageError, SecureAggregationError
from archipel.protocol import public_bytes
from archipel.protocol.secagg_plus.hybrid import Hybrid
from archipel.protocol.secagg_plus.messages import Packed, Question, pack
from archipel.protocol.secagg_plus.participant import Participant
from archipel.protocol.secagg_plus.sizes import Assumptions, Sizes
from archipel.protocol.secagg_plus.state import read_state
from archipel.protocol.secagg_plus.terms import Terms
from tests.support.neighbour_rounds import ENROLMENT, NeighbourRound, enrolled, make_terms
from tests.support.rounds import fixed, stream

COUNT = 6
SIZES, ASSUMED = Sizes(4, 3, 4), Assumptions(0, 0.2, security=1, correctness=1)
TERMS = make_terms(SIZES, ASSUMED, COUNT)
HYBRID = make_terms(SIZES, ASSUMED, COUNT, Hybrid)
STEPS = "advertise", "draw", "deal", "receive", "mask", "confirm", "answer"


class Killed(Exception):
    pass


class Mortal:
    """A device with a disk: it stores its state before it sends what a step returned, and may be killed in between.

    `die` is called at (step, point), the points being "computed", "stored" and "sent"; where it raises Killed, the
    memory is lost, and the step is done again with what is on the disk.
    """

    def __init__(self, index: int, die: Callable[[str, str], None], terms: Terms) -> None:
        self._index, self._die, self._terms, self.starts = index, die, terms, 0
        self.disk: bytes | None = None
        self.vector: Any = None
        self.sent: dict[str, list[bytes]] = {step: [] for step in STEPS}
        self._start()

    def _start(self) -> None:
        self.starts += 1
        # Other randomness after each start, as a generator of the system gives.
        given = (
            self._terms,
            *enrolled(self._index),
            public_bytes(ENROLMENT),
            stream(f"restart {self._index} {self.starts}"),
        )
        self.device = Participant(*given) if self.disk is None else Participant.resume(self.disk, *given)

    @property
    def device_id(self) -> str:
        return self.device.device_id

    def __getattr__(self, step: str) -> Callable[..., Any]:
        def do(*given: Any) -> Any:
            while True:
                try:
                    return self._do(step, given)
                except Killed:
                    self._start()

        return do

    def _do(self, step: str, given: tuple[Any, ...]) -> Any:
        if step == "mask" and self.vector is not None and self.device.is_masked(self.vector):
            said = self.vector
        else:
            said = getattr(self.device, step)(*given)
            self._die(step, "computed")
            # The vector first: a state that says "masked" without it would be of no use.
            self.vector = said if step == "mask" else self.vector
            self.disk = self.device.save()
            self._die(step, "stored")
        self.sent[step].append(pack(said) if isinstance(said, Packed) else bytes(said))
        self._die(step, "sent")
        return said


POINTS = "computed", "stored", "sent"
# With ML-KEM the same steps; what it adds is drawn and kept in these.
WITH_ML_KEM = [(HYBRID, step, point) for step in ("deal", "receive", "mask") for point in ("computed", "sent")]


@pytest.mark.parametrize(
    ("terms", "step", "point"), [*((TERMS, step, point) for step in STEPS for point in POINTS), *WITH_ML_KEM]
)
@pytest.mark.sampled(every=6)
def test_a_device_killed_at_any_point_of_any_step_stays_in_its_round(terms: Terms, step: str, point: str) -> None:
    killed = []

    def die(*at: str) -> None:
        if at == (step, point) and not killed:
            killed.append(at)
            raise Killed

    run = NeighbourRound(COUNT, terms)
    mortal = Mortal(0, die, terms)
    place = next(p for p, device in enumerate(run.devices) if device.device_id == mortal.device_id)
    run.devices[place] = mortal  # type: ignore[call-overload]
    run.open()
    run.deal(range(COUNT))
    run.receive(range(COUNT))
    assert run.sharers == set(range(COUNT))
    run.mask({p: np.full(5, 1 + p, np.uint32) for p in range(COUNT)})
    run.answer(range(COUNT))
    np.testing.assert_array_equal(run.unmask(), np.full(5, 21, np.uint32))
    assert killed and mortal.starts == 2  # noqa: PT018
    # What left the device is one message a step, however often.
    assert {name: len(set(said)) for name, said in mortal.sent.items()} == dict.fromkeys(STEPS, 1)
    assert len(mortal.sent[step]) == (2 if point == "sent" else 1)
    # Nothing is left that unmasks anybody, but for what was said.
    kept = read_state(mortal.disk or b"")
    assert (kept.cipher_secret, kept.mask_secret, kept.seed, kept.held) == (b"", b"", b"", {})
    assert (kept.parts, kept.heard) == ({}, {})


def through(step: str) -> tuple[NeighbourRound, bytes]:
    """A round in which everybody has done everything up to `step`, and what device 0 has stored then."""
    run = NeighbourRound(COUNT, TERMS)
    run.open()
    run.deal(range(COUNT))
    run.receive(range(COUNT))
    if step == "mask":
        run.mask({p: np.full(5, 1 + p, np.uint32) for p in range(COUNT)})
    if step == "confirm":
        run.mask({p: np.full(5, 1 + p, np.uint32) for p in range(COUNT)})
        for p in range(COUNT):
            run.questions[p] = run.roster.ask(p, run.survivors)
            run.devices[p].confirm(run.questions[p])
    return run, run.devices[0].save()


def resumed(run: NeighbourRound, state: bytes) -> Participant:
    index = next(i for i in range(COUNT) if same(i, run.devices[0].device_id))
    return Participant.resume(state, TERMS, *enrolled(index), public_bytes(ENROLMENT), stream("after"))


def same(index: int, name: str) -> bool:
    return Participant(TERMS, *enrolled(index), public_bytes(ENROLMENT), stream("")).device_id == name


def test_no_second_vector_is_masked_after_a_restart() -> None:
    run, state = through("mask")
    assert (read_state(state).mask_secret, read_state(state).seed) == (b"", b"")
    device = resumed(run, state)
    with pytest.raises(SecureAggregationError, match="expected 'confirm'"):
        device.mask(np.full(5, 9, np.uint32), run.roster.pair(0, run.sharers))
    assert not device.is_masked(np.full(5, 9, np.uint32))


def test_with_ml_kem_the_parts_of_masks_are_kept_until_the_vector_is_masked() -> None:
    run = NeighbourRound(COUNT, HYBRID)
    run.open()
    run.deal(range(COUNT))
    device = run.devices[0]
    assert list(read_state(device.save()).parts) == run.roster.drawn[0].tolist()
    run.receive(range(COUNT))
    kept = read_state(device.save())
    assert sorted(kept.heard) == run.roster.inbox(0).dealers
    assert kept.cipher_secret == b""
    device.mask(np.full(5, 1, np.uint32), run.roster.pair(0, run.sharers))
    kept = read_state(device.save())
    assert (kept.mask_secret, kept.seed, kept.parts, kept.heard) == (b"", b"", {}, {})


def test_another_question_is_not_answered_after_a_restart() -> None:
    run, state = through("confirm")
    asked = run.questions[0]
    device = resumed(run, state)
    other = Question(present=asked.present[1:], left=asked.present[:1])
    with pytest.raises(SecureAggregationError, match="expected 'answer'"):
        device.confirm(other)
    assert device.confirm(asked) == resumed(run, state).confirm(asked)
    with pytest.raises(ConsistencyError, match="not the one that this device has confirmed"):
        device.answer(other)


def test_a_state_is_for_one_round_and_one_device() -> None:
    run, state = through("receive")
    stranger = next(i for i in range(COUNT) if not same(i, run.devices[0].device_id))
    with pytest.raises(ConsistencyError, match="not of device"):
        Participant.resume(state, TERMS, *enrolled(stranger), public_bytes(ENROLMENT), stream(""))
    index = next(i for i in range(COUNT) if same(i, run.devices[0].device_id))
    session = replace(TERMS.session, round_id=fixed("another", 16).hex())
    with pytest.raises(ConsistencyError, match="it is of round"):
        Participant.resume(
            state, replace(TERMS, session=session), *enrolled(index), public_bytes(ENROLMENT), stream("")
        )


def test_a_damaged_state_is_refused_and_shows_nothing() -> None:
    _, state = through("receive")
    secret = read_state(state).seed
    for end in range(0, len(state) - 1, 97):
        with pytest.raises(MessageError, match="damaged") as raised:
            read_state(state[:end])
        assert secret.hex() not in str(raised.value)
    assert repr(secret) not in repr(read_state(state))
