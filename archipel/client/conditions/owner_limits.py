"""The owner's limits: which rounds a device takes part in. All of them are checked before any computation.

A limit is a function that returns why the device must not take part in a round, or an empty text if it may. The table
that holds the function says when it is called, which is as early as what it needs is known:

    BEFORE_DOWNLOAD   with the plan alone, before anything is fetched
    WITH_BUNDLE       with the signed manifest, before the weights are fetched
    WITH_EXAMPLES     with the number of local examples, before anything is computed on them

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
from archipel.client.memory.privacy import DELTA, epsilon, noise_in_round
from archipel.errors import OwnerRefusalError
from archipel.protocol.messages import LeaveReason, RoundPlan
from archipel.protocol.narrow import masked_size
from archipel.protocol.plain import plain_size
from archipel.protocol.vector import Layout

DAY = 86400.0


@dataclass(frozen=True)
class Asked:
    """What is known of a round from its plan alone; `now` is in Unix seconds."""

    plan: RoundPlan
    config: AgentConfig
    record: DeviceRecord
    journal: Journal
    now: float


@dataclass(frozen=True)
class AskedWithBundle(Asked):
    """The same with the signed manifest, and the layout of what the round uploads."""

    manifest: Manifest
    layout: Layout


@dataclass(frozen=True)
class AskedWithExamples(Asked):
    """The same with the signed manifest, and the number of local examples."""

    manifest: Manifest
    examples: int


A = TypeVar("A", bound=Asked)
Table = Sequence[tuple[LeaveReason, Callable[[A], str]]]


class OwnerLimits:
    """The limits of one device. `clock` gives Unix seconds."""

    def __init__(
        self, config: AgentConfig, record: DeviceRecord, journal: Journal, clock: Callable[[], float] = time.time
    ) -> None:
        self.config = config
        self._record = record
        self._journal = journal
        self._clock = clock

    def check_plan(self, plan: RoundPlan) -> None:
        """Check the plan, before anything is fetched. Raises OwnerRefusalError."""
        _ask(BEFORE_DOWNLOAD, Asked(plan, *self._own()))

    def check_bundle(self, plan: RoundPlan, manifest: Manifest, layout: Layout) -> None:
        """Check the manifest, before weights are fetched and graphs loaded. Raises OwnerRefusalError."""
        _ask(WITH_BUNDLE, AskedWithBundle(plan, *self._own(), manifest, layout))

    def check_examples(self, plan: RoundPlan, manifest: Manifest, examples: int) -> None:
        """Check the number of local examples, before anything is computed on them. Raises OwnerRefusalError."""
        _ask(WITH_EXAMPLES, AskedWithExamples(plan, *self._own(), manifest, examples))

    def _own(self) -> tuple[AgentConfig, DeviceRecord, Journal, float]:
        return self.config, self._record, self._journal, self._clock()


def with_allowed_publishers(record: DeviceRecord, config: AgentConfig) -> DeviceRecord:
    """The record with only those pinned publisher keys that the owner allows."""
    if not config.publishers:
        return record
    # An intersection, because `publishers` may only narrow what the device pinned at enrolment.
    keys = [key for key in record.publisher_keys if key.hex() in config.publishers]
    return msgspec.structs.replace(record, publisher_keys=keys)


def check_population(population: str, config: AgentConfig) -> str:
    """Why the owner does not allow this population; empty if the owner does."""
    if not config.populations or population in config.populations:
        return ""
    return f"population {population!r}, its owner allows {', '.join(config.populations)} (populations)"


def check_memory(manifest: Manifest, config: AgentConfig) -> str:
    """Why the owner does not allow loading this bundle; empty if the owner does."""
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
    # In a plain round the server sees each update by itself, whatever the cohort: `allow_plain` decides about it.
    if asked.plan.privacy == "plain" or asked.plan.min_cohort >= asked.config.min_cohort:
        return ""
    return (
        f"a cohort of {asked.plan.min_cohort} or more, its owner allows {asked.config.min_cohort} or more (min_cohort)"
    )


def _contributors(asked: Asked) -> str:
    # The limit is about queries; the limit for trainings is `min_cohort`.
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
    # Without this round itself, which is in the journal already.
    begun = asked.journal.count_begun_since(asked.now - DAY, besides=asked.plan.round_id)
    return "" if begun < most else f"{begun} rounds in the last day, its owner allows {most} (max_rounds_per_day)"


# --- by the signed manifest -------------------------------------------------------------------------------------------


def _memory(asked: AskedWithBundle) -> str:
    return check_memory(asked.manifest, asked.config)


def _upload(asked: AskedWithBundle) -> str:
    plan, manifest, layout = asked.plan, asked.manifest, asked.layout
    # A plain update is a safetensors file.
    masked = masked_size(layout, plan.max_cohort * plan.site, plan.modulus_bits, narrow=plan.narrow)
    size = masked if plan.privacy == "secure" else plain_size(layout)
    if plan.kind == "training":
        # The manifest may state more than the layout has; the owner's limit is for the larger of the two.
        size = max(manifest.limits.upload_bytes, size)
    if size <= asked.config.max_upload_bytes:
        return ""
    return (
        f"bundle {manifest.name!r}: up to {size} bytes of upload, its owner allows {asked.config.max_upload_bytes} "
        "(max_upload_bytes)"
    )


def _entries(asked: AskedWithBundle) -> str:
    manifest, layout, config = asked.manifest, asked.layout, asked.config
    # A query answers a question about the examples, so its answer has a smaller limit than a model's update.
    training = asked.plan.kind == "training"
    most = config.max_upload_entries if training else min(config.max_upload_entries, config.max_query_entries)
    if layout.length <= most:
        return ""
    setting = "max_upload_entries" if most == config.max_upload_entries else "max_query_entries"
    return f"bundle {manifest.name!r}: {layout.length} numbers to send, its owner allows {most} ({setting})"


# --- with the number of examples --------------------------------------------------------------------------------------


def _epsilon(asked: AskedWithExamples) -> str:
    """The epsilon of everything that this device released with noise, this round included."""
    most = asked.config.max_epsilon
    if most is None:
        return ""
    noise, rho = noise_in_round(asked.plan, asked.manifest, asked.examples)
    # Without stated noise no epsilon bounds the round, so any limit excludes it.
    if noise != "added" or rho <= 0:
        return f"no noise whose strength the bundle states, its owner allows an epsilon of {most:g} (max_epsilon)"
    # rho adds up over rounds (zero-concentrated differential privacy); epsilon follows from the sum.
    # Without this round itself, which is in the journal already where it is resumed.
    before = sum(each.rho for each in asked.journal.sums(besides=asked.plan.round_id).spent)
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
