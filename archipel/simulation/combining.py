"""How the updates of a simulated round become one sum: with attacks, in secure groups, by a robust rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest
from archipel.errors import SimulationError
from archipel.permutations import permutation
from archipel.privacy.central import Noise
from archipel.privacy.central import check_composition as check_noise
from archipel.protocol.bounds import groups as bound_groups
from archipel.protocol.vector import DecodedSum, Layout
from archipel.simulation.attacks import ATTACKS, draw_attackers
from archipel.simulation.draws import drawn_generator
from archipel.simulation.kept import GroupSums, KeptUpdates, divide
from archipel.simulation.secure.protocol import seats_of
from archipel.simulation.sums import Arrays, SecureSum, Sum
from archipel.simulation.work import Work
from archipel.strategies.robust.composing import check_composition
from archipel.strategies.robust.parts import (
    Part,
    add_parts,
    aggregate_parts,
    aggregate_rows,
    check_memory,
    means,
    ports_by_kind,
)
from archipel.strategies.robust.rule import ROOT

if TYPE_CHECKING:
    from archipel.simulation.rounds import RoundSettings

Tensors = dict[str, NDArray[Any]]
_GROUPS, _BUCKETS, _SEED = 0x67726F75, 0x6275636B, 2**32


@dataclass(frozen=True)
class Combined:
    """A round's sum, of how many devices, and what the rule keeps."""

    total: DecodedSum
    devices: int
    state: Tensors


class Combining:
    """Plans what a round keeps of its updates, and makes one sum of it.

    Arguments:
        manifest: the bundle's.
        layout: of the uploads.
        population: how many clients there are, without the server's own; this one has the number after the last.
        settings: of the rounds.

    Raises SimulationError, PolicyError for settings that do not go together or with this bundle.
    """

    def __init__(self, manifest: Manifest, layout: Layout, population: int, settings: RoundSettings) -> None:
        self._settings, self._least = settings, manifest.privacy.min_cohort
        self._root = population if settings.root else None
        self._attackers = draw_attackers(settings.attack, population, settings.seed)
        self._check(manifest, layout)

    @property
    def root(self) -> int | None:
        """The client that has the server's own examples."""
        return self._root

    def modulus_bits(self, layout: Layout) -> int | None:
        """Of secure rounds: those that hold the sum of a group, or of the cohort."""
        return layout.modulus_bits(self._largest) if self._settings.privacy == "secure" else None

    def plan(self, work: Work, drawn: list[int]) -> Work:
        """The round's work, with what it keeps of the updates of these clients."""
        settings = self._settings
        single = settings.attack.over_updates or (settings.aggregation.robust and not settings.secure_groups)
        divided = None
        if settings.secure_groups:
            divided = self.divide(work.number, drawn)
            if self._root is not None:
                divided[self._root] = settings.secure_groups
        return replace(work, groups=divided, single=single, cohort=self._largest)

    def divide(self, number: int, drawn: list[int]) -> dict[int, int]:
        """The secure group of each of these clients, from 0 on."""
        order = permutation(len(drawn), self._settings.seed % _SEED, _GROUPS, number)
        return divide(np.array(drawn), self._settings.secure_groups, order)

    def combine(
        self, work: Work, total: Sum, devices: int, state: Mapping[str, NDArray[Any]], noise: Noise | None = None
    ) -> Combined:
        """The round's sum.

        Arguments:
            work: as `plan` returned it.
            total: what the engine returned.
            devices: how many updates are in it, without the server's own.
            state: what the rule keeps, {} in the first round.
            noise: what the server adds to the sum.

        Raises ArchipelError where the round has no sum: too few groups, or a sum that no devices can have sent.
        """
        settings = self._settings
        if isinstance(total, KeptUpdates) and settings.attack.over_updates:
            total = self._attacked(work, total)
        if isinstance(total, KeptUpdates) and (work.groups is not None or not settings.aggregation.robust):
            counted = work.counted_sum()
            for client, arrays in sorted(total.updates.items()):
                counted.add(arrays, client)
            total = counted
        if noise is not None:
            if not isinstance(total, SecureSum):
                raise TypeError(f"a {type(total).__name__} has no whole numbers to add noise to")
            return Combined(total.released(devices, noise), devices, {})
        if not settings.aggregation.robust and not isinstance(total, GroupSums):
            return Combined(total.decoded(devices), devices, {})
        parts, root = self._parts(work, total)
        if not parts:
            raise SimulationError("no device's update came")
        if settings.aggregation.robust:
            order = permutation(len(parts), settings.seed % _SEED, _BUCKETS, work.number)
            made, after = aggregate_parts(parts, work.layout, settings.aggregation, state, order, root)
        else:
            made, after = add_parts(parts, work.layout), {}
        counted_devices = sum(part.devices for part in parts)
        work.layout.check_sum(made, counted_devices)
        return Combined(made, counted_devices, after)

    @property
    def _largest(self) -> int:
        """The most devices of one sum."""
        return seats_of(self._settings)

    def _parts(self, work: Work, total: Sum) -> tuple[list[Part], Part | None]:
        if isinstance(total, GroupSums):
            # A secure group with fewer devices than the policy asks for gives no sum.
            groups = sorted(group for group, count in total.counts.items() if count >= self._least)
            parts = [Part(total.decode_group(group), total.counts[group]) for group in groups]
            own = self._settings.secure_groups if self._root is not None else -1
            root = Part(total.decode_group(own), 1) if own in total.counts else None
            return [part for group, part in zip(groups, parts) if group != own], root
        if not isinstance(total, KeptUpdates):
            raise TypeError(f"a {type(total).__name__} has no single updates")
        singles = {client: self._single(work, arrays) for client, arrays in sorted(total.updates.items())}
        root = None if self._root is None else singles.pop(self._root, None)
        return list(singles.values()), root

    def _single(self, work: Work, arrays: Arrays) -> Part:
        return Part(DecodedSum.of({port: arrays[port.name] for port in work.layout.updates}), 1)

    def _attacked(self, work: Work, total: KeptUpdates) -> KeptUpdates:
        """The updates with those of attackers replaced, each as long as its device could upload it at most."""
        settings = self._settings
        honest = [client for client in sorted(total.updates) if client not in self._attackers and client != self._root]
        bad = [client for client in sorted(total.updates) if client in self._attackers]
        if not honest or not bad:
            return total
        ports = [port for each in ports_by_kind(work.layout).values() for port in each]
        rows = means([self._single(work, total.updates[client]) for client in honest], ports)
        order = permutation(len(honest) + len(bad), settings.seed % _SEED, _BUCKETS, work.number)
        root = {}
        if self._root is not None and self._root in total.updates:
            root = {ROOT: means([self._single(work, total.updates[self._root])], ports)[0]}

        def rule(updates: NDArray[np.float64]) -> NDArray[np.float64]:
            if not settings.aggregation.robust or settings.secure_groups:
                return np.asarray(updates.mean(axis=0))
            return aggregate_rows(updates, settings.aggregation, root, order)[0]

        generator = drawn_generator("attack", settings.seed, work.number)
        sent = ATTACKS[settings.attack.name](
            rows, len(bad), generator=generator, rule=rule, strength=settings.attack.strength
        )
        attacked = KeptUpdates(work.layout, plain=work.modulus_bits is None)
        attacked.updates = dict(total.updates)
        for client, row in zip(bad, sent):
            attacked.add(_upload(work.layout, total.updates[client], ports, row), client)
        return attacked

    def _check(self, manifest: Manifest, layout: Layout) -> None:
        settings = self._settings
        rule, groups = settings.aggregation, settings.secure_groups
        asynchronous = settings.pacing.mode == "asynchronous"
        if settings.attack.over_updates and asynchronous:
            raise SimulationError(
                "mode: asynchronous rounds add up updates of several versions; attacks over updates need updates of one"
            )
        if rule.root:
            raise SimulationError(
                f"aggregation.root: {rule.root} is a device of a server; a simulation takes examples of the server's "
                "own; give root"
            )
        if rule.rule == "fltrust" and not settings.root:
            raise SimulationError("aggregation 'fltrust': needs examples of the server's own; give root")
        if settings.root and rule.rule != "fltrust":
            raise SimulationError(f"root: aggregation {rule.rule!r} does not use the server's own examples")
        check_composition(
            rule, groups, manifest, layout, privacy=settings.privacy, asynchronous=asynchronous,
            cohort=settings.cohort, fewest=settings.cohort,
        )  # fmt: skip
        if settings.attack.over_updates:
            check_memory(rule, settings.cohort, layout)
        check_noise(
            settings.differential_privacy, manifest, layout, privacy=settings.privacy, mode=settings.pacing.mode,
            aggregation=rule, secure_groups=groups, hyperparameters=settings.hyperparameters,
        )  # fmt: skip


def _upload(layout: Layout, own: Arrays, ports: list[Any], row: NDArray[np.float64]) -> Arrays:
    """The update with this mean and the attacker's own weight, shortened to the bounds of the device's check."""
    weights = [port for port in layout.updates if port.kind == "weight"]
    weight = float(own[weights[0].name]) if weights else 1.0
    arrays, start = dict(own), 0
    for port in ports:
        stop, factor = start + own[port.name].size, 1.0 if port.weighting == "uniform" else weight
        arrays[port.name] = row[start:stop].reshape(own[port.name].shape) * factor
        start = stop
    for group in bound_groups(layout.updates):
        size, bound = group.measure(arrays), group.bound * (weight if group.weighted else 1.0)
        for port in group.ports:
            if port.name in arrays and size > bound:
                arrays[port.name] = np.asarray(arrays[port.name]) * (bound / size)
    return {port.name: np.asarray(arrays[port.name]).astype(port.dtype) for port in layout.updates}
