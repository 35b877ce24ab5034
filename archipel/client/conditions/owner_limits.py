"""What the device's owner lets it take part in: every limit, in one place, asked before any work.

A limit is a function that gives the reason why a round is not for this device, empty where it is. The table that it
stands in says when it is asked:

    BEFORE_DOWNLOAD   by the plan alone: nothing was fetched yet
    WITH_BUNDLE       by the signed manifest: nothing was computed yet
    WITH_EXAMPLES     with the number of local examples, where the answer depends on it: nothing was computed yet

A new limit is a setting of AgentConfig, a function, and a line in its table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from archipel.bundle import Manifest
from archipel.client.config import AgentConfig
from archipel.client.connection.identity import DeviceRecord
from archipel.client.memory.journal import Journal
from archipel.client.memory.privacy import DELTA, epsilon, noise_of
from archipel.errors import OwnerRefusalError
from archipel.protocol.messages import LeaveReason, RoundPlan
from archipel.protocol.plain import plain_size
from archipel.protocol.vector import Layout

DAY = 86400.0


@dataclass(frozen=True)
class Asked:
    """What is known of a round when a limit is asked by its plan alone."""

    plan: RoundPlan
    config: AgentConfig
    record: DeviceRecord
    journal: Journal
    now: float


@dataclass(frozen=True)
class AskedWithBundle(Asked):
    """With the signed manifest, and the layout of what the round uploads."""

    manifest: Manifest
    layout: Layout


@dataclass(frozen=True)
class AskedWithExamples(Asked):
    """With the number of local examples."""

    manifest: Manifest
    examples: int


A = TypeVar("A", bound=Asked)
Table = Sequence[tuple[LeaveReason, Callable[[A], str]]]


class OwnerLimits:
    """One device's. `clock` gives Unix seconds."""

    def __init__(
        self, config: AgentConfig, record: DeviceRecord, journal: Journal, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self._record = record
        self._journal = journal
        self._clock = clock

    def check_plan(self, plan: RoundPlan) -> None:
        """Before anything is fetched. Raises OwnerRefusalError."""
        _ask(BEFORE_DOWNLOAD, Asked(plan, *self._own()))

    def check_bundle(self, plan: RoundPlan, manifest: Manifest, layout: Layout) -> None:
        """Before weights are fetched and graphs loaded. Raises OwnerRefusalError."""
        _ask(WITH_BUNDLE, AskedWithBundle(plan, *self._own(), manifest, layout))

    def check_examples(self, plan: RoundPlan, manifest: Manifest, examples: int) -> None:
        """Before anything is computed on so many local examples. Raises OwnerRefusalError."""
        _ask(WITH_EXAMPLES, AskedWithExamples(plan, *self._own(), manifest, examples))

    def _own(self) -> tuple[AgentConfig, DeviceRecord, Journal, float]:
        return self.config, self._record, self._journal, self._clock()


def allowed(record: DeviceRecord, config: AgentConfig) -> DeviceRecord:
    """The record with those of the pinned publishers that the owner allows."""
    if not config.publishers:
        return record
    keys = [key for key in record.publisher_keys if key.hex() in config.publishers]
    return msgspec.structs.replace(record, publisher_keys=keys)


def check_population(population: str, config: AgentConfig) -> str:
    """Why a device does not work for this population; empty where it does."""
    if not config.populations or population in config.populations:
        return ""
    return f"population {population!r}, its owner allows {', '.join(config.populations)} (populations)"


def check_memory(manifest: Manifest, config: AgentConfig) -> str:
    """Why a bundle is not loaded; empty where it is."""
    if manifest.limits.peak_bytes <= config.max_peak_bytes:
        return ""
    return (
        f"bundle {manifest.name!r}: up to {manifest.limits.peak_bytes} bytes of memory, its owner allows "
        f"{config.max_peak_bytes} (max_peak_bytes)"
    )


def _ask(table: Table[A], asked: A) -> None:
    for code, limit in table:
        reason = limit(asked)
        if reason:
            raise OwnerRefusalError(code, f"plan {asked.plan.round_id}: {reason}")


# --- by the plan alone ------------------------------------------------------------------------------------------------


def _population(asked: Asked) -> str:
    return check_population(asked.record.population, asked.config)


def _publisher(asked: Asked) -> str:
    if asked.record.publisher_keys:
        return ""
    return "none of the publishers that this device pinned is among those that its owner allows (publishers)"


def _kind(asked: Asked) -> str:
    if asked.plan.kind in asked.config.kinds:
        return ""
    return f"kind {asked.plan.kind}, its owner allows {', '.join(asked.config.kinds) or 'none'} (kinds)"


def _plain(asked: Asked) -> str:
    if asked.plan.privacy == "secure" or asked.config.allow_plain:
        return ""
    return f"privacy {asked.plan.privacy!r}; this device's owner allows secure rounds only (setting allow_plain)"


def _cohort(asked: Asked) -> str:
    # A plain update is hidden among nobody: `allow_plain` is the limit there.
    if asked.plan.privacy == "plain" or asked.plan.min_cohort >= asked.config.min_cohort:
        return ""
    return (
        f"a cohort of {asked.plan.min_cohort} or more, its owner allows {asked.config.min_cohort} or more (min_cohort)"
    )


def _contributors(asked: Asked) -> str:
    if asked.plan.kind == "training" or asked.plan.min_contributors >= asked.config.min_contributors:
        return ""
    return (
        f"the sum of {asked.plan.min_contributors} devices with examples may be released, its owner asks for "
        f"{asked.config.min_contributors} (min_contributors)"
    )


def _pace(asked: Asked) -> str:
    most = asked.config.max_rounds_per_day
    if most is None:
        return ""
    begun = asked.journal.begun_since(asked.now - DAY, besides=asked.plan.round_id)
    return "" if begun < most else f"{begun} rounds in the last day, its owner allows {most} (max_rounds_per_day)"


# --- by the signed manifest -------------------------------------------------------------------------------------------


def _memory(asked: AskedWithBundle) -> str:
    return check_memory(asked.manifest, asked.config)


def _upload(asked: AskedWithBundle) -> str:
    plan, manifest, layout = asked.plan, asked.manifest, asked.layout
    size = layout.length * -(-plan.modulus_bits // 8) if plan.privacy == "secure" else plain_size(layout)
    if plan.kind == "training":
        size = max(manifest.limits.upload_bytes, size)
    if size <= asked.config.max_upload_bytes:
        return ""
    return (
        f"bundle {manifest.name!r}: up to {size} bytes of upload, its owner allows {asked.config.max_upload_bytes} "
        "(max_upload_bytes)"
    )


def _entries(asked: AskedWithBundle) -> str:
    manifest, layout, config = asked.manifest, asked.layout, asked.config
    training = asked.plan.kind == "training"
    most = config.max_upload_entries if training else min(config.max_upload_entries, config.max_query_entries)
    if layout.length <= most:
        return ""
    setting = "max_upload_entries" if most == config.max_upload_entries else "max_query_entries"
    return f"bundle {manifest.name!r}: {layout.length} numbers to send, its owner allows {most} ({setting})"


# --- with the number of examples --------------------------------------------------------------------------------------


def _epsilon(asked: AskedWithExamples) -> str:
    """All that this device released with noise, and what this round adds."""
    most = asked.config.max_epsilon
    if most is None:
        return ""
    noise, rho = noise_of(asked.manifest, asked.plan.kind, asked.plan.program, asked.examples)
    if noise != "added" or rho <= 0:
        return f"no noise whose strength the bundle states, its owner allows an epsilon of {most:g} (max_epsilon)"
    before = sum(each.rho for each in asked.journal.sums().spent)
    spent = epsilon(before + rho, DELTA)
    if spent <= most:
        return ""
    return f"epsilon {spent:.3g} with all rounds before, its owner allows {most:g} (max_epsilon)"


BEFORE_DOWNLOAD: Table[Asked] = (
    ("population", _population),
    ("publisher", _publisher),
    ("kind", _kind),
    ("privacy", _plain),
    ("cohort", _cohort),
    ("cohort", _contributors),
    ("pace", _pace),
)
WITH_BUNDLE: Table[AskedWithBundle] = (("size", _memory), ("size", _upload), ("size", _entries))
WITH_EXAMPLES: Table[AskedWithExamples] = (("privacy", _epsilon),)
