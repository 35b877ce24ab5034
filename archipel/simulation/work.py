"""What every device of a round gets, and what comes back: one sum, and a line about each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from numpy.typing import NDArray

from archipel.protocol.vector import Layout
from archipel.simulation.kept import GroupSums, KeptUpdates
from archipel.simulation.sums import FloatSum, SecureSum, Sum

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Work:
    """A round's plan as its devices see it.

    `layout` is that of the updates, with the round's clip; `modulus_bits` is None in plain rounds; `cohort` is the
    largest number of devices in the sum; `saved` the last round after which the run can go on if it is killed. The
    updates are `staleness` versions behind, so their changes count (1 + staleness)^-staleness_exponent. `groups`,
    client -> group, has one sum made for each group; `single` has each update kept by itself. `dropped` are
    devices of the cohort whose updates never came.
    """

    number: int
    parameters: Tensors
    broadcast: Tensors
    hyperparameters: Mapping[str, float]
    layout: Layout
    cohort: int
    modulus_bits: int | None
    seed: int
    saved: int = 0
    staleness: int = 0
    staleness_exponent: float = 0.0
    dropped: tuple[int, ...] = ()
    groups: Mapping[int, int] | None = None
    single: bool = False

    @property
    def exact(self) -> bool:
        """Whether the updates add up to the same in any order."""
        return self.modulus_bits is not None

    def empty_sum(self) -> Sum:
        if self.single:
            return KeptUpdates(self.layout, plain=self.modulus_bits is None)
        return self.counted_sum()

    def counted_sum(self) -> Sum:
        """As `empty_sum`, but for updates that nobody keeps by themselves."""
        if self.groups is not None and self.modulus_bits is not None:
            return GroupSums(self.layout, self.modulus_bits, self.cohort, self.groups)
        if self.modulus_bits is None:
            return FloatSum(self.layout, self.staleness, self.staleness_exponent)
        return SecureSum(self.layout, self.modulus_bits, self.cohort, self.staleness, self.staleness_exponent)


@dataclass
class Report:
    """What one device did in a round. `loss` is the mean over its examples in all steps, None where there is none;
    `left` says why its update is not in the sum, "" where it is."""

    client: int
    examples: int = 0
    steps: int = 0
    loss: float | None = None
    left: str = ""


@dataclass
class Partial:
    """The sum of some devices' updates, and a report of each."""

    total: Sum
    reports: list[Report] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """How many updates are in the sum."""
        return sum(not report.left for report in self.reports)

    def merge(self, other: Partial) -> None:
        """Add another part of the same round."""
        self.total.merge(other.total)
        self.reports += other.reports


class Engine(Protocol):
    """Runs the local rounds of devices."""

    def run(self, work: Work, clients: Sequence[int]) -> Partial: ...

    def close(self) -> None: ...
