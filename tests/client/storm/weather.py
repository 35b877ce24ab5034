"""Which requests fail, and how: drawn from a seed, and harder at some times than at others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from tests.support import faults
from tests.support.faults import Fault, Proxy

KINDS: dict[str, tuple[int, Callable[[random.Random], Fault]]] = {
    "request lost": (4, lambda rng: faults.lost_request),
    "answer lost": (4, lambda rng: faults.lost_answer),
    "reset": (2, lambda rng: faults.reset),
    "truncated": (2, lambda rng: faults.truncated),
    "garbage": (2, lambda rng: faults.garbage),
    "noise": (1, lambda rng: faults.noise),
    "page": (2, lambda rng: faults.page),
    "delayed": (4, lambda rng: faults.delayed(rng.uniform(0.05, 1.5))),
    "dripping": (2, lambda rng: faults.dripping),
    "silent": (1, lambda rng: faults.silent(rng.uniform(0.5, 3.0))),
    "twice": (3, lambda rng: faults.twice),
    "overtaken": (3, lambda rng: faults.overtaken(rng.expovariate(1.0))),
    "429": (2, lambda rng: faults.status(429, Retry_After=rng.choice(["0.2", "1", "soon", "-3"]))),
    "503": (2, lambda rng: faults.status(503, Retry_After=rng.choice(["0", "1", "Thu, 01 Jan 1970 00:00:00 GMT"]))),
    "502": (1, lambda rng: faults.status(502)),
    "401": (1, lambda rng: faults.status(401)),
}  # fmt: skip
"""With the weight of each."""


class Weather:
    """The proxy's faults. `rate` is the share of requests that fail."""

    def __init__(self, proxy: Proxy, rng: random.Random) -> None:
        self.rate = 0.0
        self.made: Counter[str] = Counter()
        self._rng = rng
        proxy.fault = self._fault

    def change(self) -> None:
        self.rate = self._rng.choice([0.02, 0.05, 0.1, 0.2, 0.4])

    def calm(self) -> None:
        self.rate = 0.0

    def _fault(self, method: str, path: str) -> Fault | None:
        if self._rng.random() >= self.rate:
            return None
        [name] = self._rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])
        self.made[name] += 1
        return KINDS[name][1](self._rng)
