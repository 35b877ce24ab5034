"""Limits how many requests one device, access token or address may make, in all and at the same time.

Each web process counts by itself, so with `workers` processes the limits are as many times higher. Counting takes
microseconds and bounded memory however many sources there are. (The in-memory storage of the `limits` package walks
over all its keys every 10 ms, which takes longer than a request with some ten thousand keys.)
"""

from __future__ import annotations

import ipaddress
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from archipel.server.http.problems import refuse
from archipel.server.settings import Settings

BUCKETS = 50_000
"""How many sources are remembered: those that came last. A forgotten source begins again with a full bucket."""
DOWNLOADS_OF_ONE_ADDRESS = 48
"""So many files of the demo page at once: eight browsers behind one address, of six connections each."""


class TokenBuckets:
    """One bucket for each source: `burst` requests at once, `per_second` on average."""

    def __init__(self, per_second: float, burst: float, *, entries: int = BUCKETS) -> None:
        # With a burst below 1 no request would ever be granted.
        self._per_second, self._burst, self._entries = per_second, max(1.0, burst), entries
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, source: str, now: float) -> float:
        """Return 0.0 if the request may go on, else the seconds until the next one may. `now` is in seconds."""
        with self._lock:
            # A bucket fills by itself over time, so its level is computed when a request comes, not by a timer.
            level, since = self._levels.get(source, (self._burst, now))
            # Not below 0: `now` was read before the lock, and another thread may have been faster.
            level = min(self._burst, level + max(0.0, now - since) * self._per_second)
            granted = level >= 1.0
            self._levels[source] = (level - 1.0 if granted else level, now)
            self._levels.move_to_end(source)
            if len(self._levels) > self._entries:
                self._levels.popitem(last=False)  # the source that has not come for longest
        return 0.0 if granted else (1.0 - level) / self._per_second


class Slots:
    """At most `most` requests of one source at the same time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._busy: dict[str, int] = {}
        self._lock = threading.Lock()

    def enter(self, source: str) -> Callable[[], None] | None:
        """Begin a request. Returns the function that ends it, or None if there are too many already.

        The function may be called several times (see door.at_the_end); only the first call counts.
        """
        with self._lock:
            busy = self._busy.get(source, 0)
            if busy >= self._most:
                return None
            self._busy[source] = busy + 1
        left = False

        def leave() -> None:
            nonlocal left
            with self._lock:
                if left:
                    return
                left = True
                self._busy[source] -= 1
                # An entry that stayed would be one for every source that ever came.
                if not self._busy[source]:
                    del self._busy[source]

        return leave


class RequestLimits:
    """The limits of `settings`, for one web process. `clock` is in seconds and monotonic."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        burst = settings.burst_seconds
        self._known = TokenBuckets(settings.requests_per_second, settings.requests_per_second * burst)
        self._unknown = TokenBuckets(settings.anonymous_per_second, settings.anonymous_per_second * burst)
        self._slots = Slots(settings.concurrent_requests)
        # Files for strangers have a bucket of their own, so that a page that loads uses up nobody's enrolment.
        self._files = TokenBuckets(settings.anonymous_per_second, settings.anonymous_per_second * burst)
        self._downloads = Slots(DOWNLOADS_OF_ONE_ADDRESS)
        self._all_downloads = Slots(settings.downloads)
        self._clock = clock

    def count(self, source: str, *, known: bool) -> None:
        """Count a request of `source`. `known`: it is an authenticated device or token. Raises ApiError 429."""
        wait = (self._known if known else self._unknown).take(source, self._clock())
        if wait > 0:
            raise refuse(429, "too many requests; wait, then try again", retry_after=math.ceil(wait))

    def begin_download(self, source: str) -> Callable[[], None]:
        """Count a request of `source` for a file that strangers get, and return the function that ends it.

        Raises ApiError 429 if `source` asks for too many, and 503 if everybody together does.
        """
        wait = self._files.take(source, self._clock())
        if wait > 0:
            raise refuse(429, "too many requests; wait, then try again", retry_after=math.ceil(wait))
        leave = self._downloads.enter(source)
        if leave is None:
            raise refuse(429, "too many downloads at the same time; wait for the end of an earlier one")
        leave_all = self._all_downloads.enter("")
        if leave_all is None:
            leave()
            raise refuse(503, "too many people download from this server at this moment; try again")

        def leave_both() -> None:
            leave_all()
            leave()

        return leave_both

    def enter(self, source: str) -> Callable[[], None]:
        """Begin a request and return the function that ends it. Raises ApiError 429 with too many at the same time."""
        leave = self._slots.enter(source)
        if leave is None:
            raise refuse(429, "too many requests at the same time; wait for the answer of an earlier one")
        return leave


def address_source(address: str | None) -> str:
    """The source under which anonymous requests from `address` are counted.

    For IPv6 it is the /64 network: one customer has a whole one, and could use a new address for every request.
    """
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "address:unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is None:
            return f"address:{ipaddress.IPv6Network((int(parsed), 64), strict=False)}"
        # The /64 network of ::ffff:a.b.c.d holds all IPv4 addresses, and would count them as one.
        parsed = parsed.ipv4_mapped
    return f"address:{parsed}"
