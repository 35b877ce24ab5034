"""A session ends when it was said to end, also where the web process remembers that it was valid a moment ago."""

from __future__ import annotations

import pytest

from archipel.server.database.session_cache import CACHE_SECONDS, SessionCache
from tests.support.world import World

TOKEN, OTHER = b"t" * 32, b"o" * 32


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("before", [0.5, CACHE_SECONDS / 2, CACHE_SECONDS + 1])
def test_over_http(world: World, before: float) -> None:
    """Used shortly before its end, so that it is remembered, and again at its end."""
    (device,) = world.add_devices(1)
    end = world.clock.now + world.settings.session_seconds
    world.clock.now = end - before
    assert device.call("POST", "/v1/check-ins", {})[0] == 200
    world.clock.now = end - 0.001
    assert device.call("POST", "/v1/check-ins", {})[0] == 200
    world.clock.now = end
    assert device.call("POST", "/v1/check-ins", {})[0] == 401


@pytest.mark.parametrize(
    ("kept", "expires", "last"),
    [
        (100.0, 102.0, 102.0),  # it ends before the cache's time is over
        (100.0, 1000.0, 100.0 + CACHE_SECONDS),  # and after it
    ],
)
def test_how_long_it_is_believed(kept: float, expires: float, last: float) -> None:
    cache = SessionCache()
    cache.keep(TOKEN, "device", kept, expires)
    assert cache.get(TOKEN, last - 0.001) == "device"
    assert cache.get(TOKEN, last) is None
    assert cache.get(OTHER, kept) is None


def test_what_is_forgotten_and_what_stays() -> None:
    cache = SessionCache()
    for token, device in ((TOKEN, "one"), (OTHER, "one"), (b"n" * 32, "two")):
        cache.keep(token, device, 0.0, 100.0)
    cache.drop(TOKEN)
    assert cache.get(TOKEN, 1.0) is None
    assert cache.get(OTHER, 1.0) == "one"
    cache.forget("one")
    assert cache.get(OTHER, 1.0) is None
    assert cache.get(b"n" * 32, 1.0) == "two"
