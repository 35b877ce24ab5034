from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from archipel.errors import MessageError
from archipel.privacy import Event, Gaussian, Poisson, Repeated, read_events, write_events
from archipel.privacy.events import MAX_EVENTS

GAUSSIAN = st.builds(Gaussian, noise_multiplier=st.floats(1e-6, 1e9))
POISSON = st.builds(Poisson, probability=st.floats(1e-9, 1), event=GAUSSIAN)
EVENTS = st.lists(
    st.one_of(GAUSSIAN, POISSON, st.builds(Repeated, event=st.one_of(GAUSSIAN, POISSON), count=st.integers(1, 10**9))),
    max_size=5,
)


@given(EVENTS)
def test_they_come_back(events: list[Event]) -> None:
    assert read_events(write_events(events)) == events


def test_the_format() -> None:
    data = (
        b'[{"type":"repeated","event":{"type":"poisson","probability":0.5,"event":{"type":"gaussian",'
        b'"noise_multiplier":2.0}},"count":3}]'
    )
    expected = [Repeated(event=Poisson(probability=0.5, event=Gaussian(noise_multiplier=2.0)), count=3)]
    assert read_events(data) == expected
    assert write_events(expected) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b'[{"type":"gaussian"}]',
        b'[{"type":"gaussian","noise_multiplier":0}]',
        b'[{"type":"gaussian","noise_multiplier":-1}]',
        b'[{"type":"gaussian","noise_multiplier":NaN}]',
        b'[{"type":"gaussian","noise_multiplier":1e10}]',
        b'[{"type":"gaussian","noise_multiplier":1,"extra":1}]',
        b'[{"noise_multiplier":1}]',
        b'[{"type":"poisson","probability":0.5,"event":{"type":"poisson","noise_multiplier":1}}]',
        b'[{"type":"laplace","noise_multiplier":1}]',
        b'[{"type":"poisson","probability":1.5,"event":{"type":"gaussian","noise_multiplier":1}}]',
        b'[{"type":"poisson","probability":0,"event":{"type":"gaussian","noise_multiplier":1}}]',
        b'[{"type":"repeated","count":0,"event":{"type":"gaussian","noise_multiplier":1}}]',
        b'[{"type":"repeated","count":1.5,"event":{"type":"gaussian","noise_multiplier":1}}]',
        b'[{"type":"repeated","count":2,"event":{"type":"repeated","count":2,"event":'
        b'{"type":"gaussian","noise_multiplier":1}}}]',
        b"[" * 100_000,
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="events: "):
        read_events(data)


def test_too_many_are_refused() -> None:
    one = msgspec.json.encode(Gaussian(noise_multiplier=1.0))
    with pytest.raises(MessageError, match="events: "):
        read_events(b"[" + b",".join([one] * (MAX_EVENTS + 1)) + b"]")
    with pytest.raises(MessageError, match="more than 100000 events"):
        read_events(b" " * (1 << 26))
