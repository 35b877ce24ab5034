"""How many neighbours a device of a secure round needs: for their number, the secrets' threshold and the masks.

Bell et al. 2020, *Secure single-server aggregation with (poly)logarithmic overhead*: instead of all others, a device
shares its secrets with few neighbours that it draws at random. Of these the corrupt ones must be too few to join their
shares, and those that stay must be enough to join them. Both are tails of hypergeometric distributions, which this file
adds up exactly (in floating point, from the small end), with a union bound over all devices.

Who is assumed to do what:

- a share `corrupt` of the cohort works together with the server, a share `dropped` leaves before the end;
- a `semi-honest` server keeps to the protocol and keeps what it sees; a `malicious` one does what it likes, such as
  telling two neighbours different things about who left.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from archipel.errors import PolicyError

Server = Literal["semi-honest", "malicious"]
MAX_DEVICES = 1 << 16
# Shares are meant as decimals: 0.2 of 1000 devices are 200, not 199.99999999999997.
_SMALL = 1e-9


@dataclass(frozen=True)
class Assumptions:
    """What a round must withstand.

    Attributes:
        corrupt: the share of the cohort that works with the server, from 0 to below 1.
        dropped: the share that may leave before the end, from 0 to below 1.
        server: what the server itself may do, see the top of this file.
        hidden: in how many other honest devices' sum a device's vector is at least hidden from a malicious server. A
            semi-honest one learns the sum of all honest survivors and nothing else.
        security: the probability that some device is not protected is at most 2^-security.
        correctness: with at most `dropped` leaving, the sum cannot be unmasked with probability at most 2^-correctness.
    """

    corrupt: float = 0.2
    dropped: float = 0.2
    server: Server = "malicious"
    hidden: int = 2
    security: int = 40
    correctness: int = 30

    def __post_init__(self) -> None:
        for name in ("corrupt", "dropped"):
            if not 0 <= getattr(self, name) < 1:
                raise PolicyError(f"{name}: expected a share from 0 to below 1, got {getattr(self, name)}")
        if self.server not in ("semi-honest", "malicious"):
            raise PolicyError(f"server: expected 'semi-honest' or 'malicious', got {self.server!r}")
        if self.hidden < 2:
            raise PolicyError(f"hidden: expected at least 2 others, got {self.hidden}; two alone know each other's")
        for name in ("security", "correctness"):
            if not 1 <= getattr(self, name) <= 128:
                raise PolicyError(f"{name}: expected from 1 to 128 bits, got {getattr(self, name)}")


@dataclass(frozen=True)
class Sizes:
    """Of every device in a cohort.

    Attributes:
        neighbours: how many others it draws, who each get a share of its two secrets.
        threshold: how many of these shares give a secret.
        partners: the first so many of the neighbours also share a mask with it.
    """

    neighbours: int
    threshold: int
    partners: int


def choose_sizes(cohort: int, assumed: Assumptions) -> Sizes:
    """The fewest neighbours, and the lowest threshold with them, that withstand what is `assumed`.

    Raises PolicyError, which says what stands in the way, when not even the complete graph does.
    """
    _require_cohort(cohort)
    for neighbours in range(1, cohort):
        low, high = _thresholds(cohort, neighbours, assumed)
        if low > high:
            continue
        partners = _partners(cohort, neighbours, assumed)
        if partners is not None:
            return Sizes(neighbours, low, partners)
    low, high = _thresholds(cohort, cohort - 1, assumed)
    raise PolicyError(
        f"a cohort of {cohort} with {_count(assumed.corrupt, cohort)} corrupt and {_count(assumed.dropped, cohort)} "
        f"leaving cannot be secure against a {assumed.server} server: even when each shares with all {cohort - 1} "
        f"others, the threshold would have to be at least {low} to keep secrets and at most {high} to recover them; "
        "take the protocol 'complete', which suits small cohorts, a larger cohort, or a policy with smaller shares of "
        "corrupt (colluders) or leaving devices (dropouts)"
    )


@functools.lru_cache(maxsize=64)
def choose_sizes_between(least: int, most: int, assumed: Assumptions) -> Sizes:
    """As `choose_sizes` for `most` devices, but secure for any cohort from `least` devices on, if fewer come.

    A cohort has at least one device more than the threshold, however small `least` is. Raises PolicyError.
    """
    sizes = choose_sizes(most, assumed)
    for neighbours in range(sizes.neighbours, most):
        threshold, partners = sizes.threshold, sizes.partners
        for cohort in _worst(max(least, threshold + 1, 3), most, assumed):
            drawn = min(neighbours, cohort - 1)
            threshold = max(threshold, min(_thresholds(cohort, drawn, assumed)[0], drawn))
            if not _hides(cohort, min(partners, drawn), assumed):
                partners = max(partners, _partners(cohort, drawn, assumed) or 0)
        if threshold <= _thresholds(most, neighbours, assumed)[1] and partners <= neighbours:
            return Sizes(neighbours, threshold, neighbours if assumed.server == "malicious" else partners)
    raise PolicyError(f"a cohort from {least} to {most}: no threshold is secure for all of these numbers of devices")


def _worst(least: int, most: int, assumed: Assumptions) -> list[int]:
    """Of all sizes of a cohort those with one corrupt or leaving device more than the size before: the others are
    better off than the last of these."""
    found = [least]
    for cohort in range(least + 1, most + 1):
        if any(_count(share, cohort) > _count(share, cohort - 1) for share in (assumed.corrupt, assumed.dropped)):
            found.append(cohort)
    return found


def check_sizes(sizes: Sizes, cohort: int, assumed: Assumptions) -> None:
    """Raises PolicyError unless `sizes` keep the secrets of a cohort of this size under what is `assumed`.

    Only security is checked, as a device does: whether enough devices stay is the server's concern.
    """
    _require_cohort(cohort)
    neighbours = min(sizes.neighbours, cohort - 1)
    if not 1 <= sizes.threshold <= neighbours or not 1 <= sizes.partners <= sizes.neighbours:
        raise PolicyError(f"{sizes} of a cohort of {cohort}: the threshold or the partners exceed the neighbours")
    low, _ = _thresholds(cohort, neighbours, assumed)
    if sizes.threshold < low:
        raise PolicyError(
            f"threshold {sizes.threshold} of {neighbours} neighbours in a cohort of {cohort} is below {low}, which a "
            f"{assumed.server} server with {_count(assumed.corrupt, cohort)} corrupt devices calls for"
        )
    partners = _partners(cohort, neighbours, assumed)
    if partners is None or min(sizes.partners, neighbours) < partners:
        raise PolicyError(
            f"{sizes.partners} partners for masks in a cohort of {cohort}: {partners or cohort} are needed to hide it"
        )


def corrupt_neighbours(cohort: int, neighbours: int, assumed: Assumptions) -> int:
    """How many corrupt ones any honest device has among its neighbours at most, but for 2^-(security + 1)."""
    corrupt = _count(assumed.corrupt, cohort)
    tail = _upper_tail(cohort - 1, corrupt, neighbours)
    # tail[c] is P(more than c); over all devices, and half of what is allowed: the masks have the other half.
    return int(np.argmax(cohort * tail <= 2.0 ** -(assumed.security + 1)))


def _thresholds(cohort: int, neighbours: int, assumed: Assumptions) -> tuple[int, int]:
    """The lowest threshold that keeps the secrets, and the highest at which they can still be recovered."""
    corrupt = corrupt_neighbours(cohort, neighbours, assumed)
    if assumed.server == "semi-honest":
        # At least 2, so that no single device can give a secret away.
        low = max(corrupt + 1, 2)
    else:
        # A corrupt neighbour gives the server both shares, an honest one gives one. So both secrets of a device take
        # 2 * threshold <= neighbours + corrupt. Of the honest ones that answered for its seed, `threshold - corrupt`,
        # as many as were missing when it masked may share no mask with it; the rest are those who hide it.
        low = math.ceil((neighbours + corrupt + assumed.hidden) / 2)
        low = max(low, neighbours * 2 // 3 + 1)
    staying = cohort - _count(assumed.dropped, cohort)
    # P(fewer than t stay), for one of `cohort` devices that stays itself or left.
    below = _lower_tail(cohort - 1, staying - 1, neighbours)
    high = int(np.flatnonzero(cohort * below <= 2.0**-assumed.correctness)[-1])
    return low, high


def _partners(cohort: int, neighbours: int, assumed: Assumptions) -> int | None:
    """How many of the neighbours must share masks; None where all of them are too few."""
    if assumed.server == "malicious":
        # The bound on who hides a device counts on a mask with every neighbour.
        return neighbours
    honest = cohort - _count(assumed.corrupt, cohort) - _count(assumed.dropped, cohort)
    if honest <= assumed.hidden:
        return None
    fewest, most = 1, neighbours
    if not _hides(cohort, most, assumed):
        return None
    while fewest < most:
        middle = (fewest + most) // 2
        if _hides(cohort, middle, assumed):
            most = middle
        else:
            fewest = middle + 1
    return fewest


def _hides(cohort: int, partners: int, assumed: Assumptions) -> bool:
    """Whether masks with so many partners connect the honest survivors, where the server is semi-honest."""
    honest = cohort - _count(assumed.corrupt, cohort) - _count(assumed.dropped, cohort)
    if assumed.server == "malicious":
        return True
    return honest > assumed.hidden and _disconnected(cohort, honest, partners) <= 2.0 ** -(assumed.security + 1)


def _disconnected(cohort: int, honest: int, partners: int) -> float:
    """A bound on P(the honest survivors fall into two parts without a mask between them).

    A union bound over all subsets of them, of each size up to half: nobody in it drew anybody of the rest, and nobody
    of the rest drew anybody in it. Each draws `partners` of the others.
    """
    inside = np.arange(1, honest // 2 + 1)
    rest = honest - inside
    drawn = np.full_like(inside, partners)
    alone = _choose(cohort - 1 - rest, drawn) - _choose(cohort - 1, drawn)
    apart = _choose(cohort - 1 - inside, drawn) - _choose(cohort - 1, drawn)
    logs = _choose(honest, inside) + inside * alone + rest * apart
    with np.errstate(over="ignore"):
        # So many ways to fall apart that their number is beyond float64 are infinitely many.
        return float(np.exp(logs[logs > -745]).sum())


def _upper_tail(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """P(X > x) for x = 0 .. drawn, where X counts the marked ones among `drawn` of a population."""
    mass = _masses(population, marked, drawn)
    # From the small end, so that the tail's smallest terms are not lost beside the large ones.
    tail = np.cumsum(mass[::-1])[::-1]
    return np.append(tail[1:], 0.0)


def _lower_tail(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    """P(X < x) for x = 0 .. drawn."""
    mass = _masses(population, marked, drawn)
    return np.append(0.0, np.cumsum(mass)[:-1])


def _masses(population: int, marked: int, drawn: int) -> NDArray[np.float64]:
    x = np.arange(drawn + 1)
    logs = _choose(marked, x) + _choose(population - marked, drawn - x) - _choose(population, np.array(drawn))
    masses: NDArray[np.float64] = np.exp(logs)
    return masses


def _choose(n: int | NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.float64]:
    """The logarithm of n over k; -inf where k is not within 0 .. n."""
    n, k = np.broadcast_arrays(n, k)
    inside = (k >= 0) & (k <= n)
    n, k = np.where(inside, n, 0), np.where(inside, k, 0)
    logs = _log_factorials(1 << int(n.max()).bit_length())
    return np.where(inside, logs[n] - logs[k] - logs[n - k], -np.inf)


@functools.cache
def _log_factorials(count: int) -> NDArray[np.float64]:
    return np.array([math.lgamma(n + 1) for n in range(count)])


def _count(share: float, cohort: int) -> int:
    return math.floor(share * cohort + _SMALL)


def _require_cohort(cohort: int) -> None:
    if not 3 <= cohort <= MAX_DEVICES:
        raise PolicyError(f"a cohort of {cohort}: a secure round has from 3 to {MAX_DEVICES:,} devices")
