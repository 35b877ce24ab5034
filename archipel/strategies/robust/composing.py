"""What robust rules and secure groups go together with: the one check of the server and of simulations."""

from __future__ import annotations

from archipel import strategies
from archipel.bundle import Manifest
from archipel.bundle.roles import Largest, Noise
from archipel.errors import PolicyError
from archipel.protocol.operator.aggregation import ROOTED, Aggregation
from archipel.protocol.vector import Layout
from archipel.strategies.robust.parts import check_memory
from archipel.strategies.robust.registry import RULES


def check_composition(
    settings: Aggregation,
    groups: int,
    manifest: Manifest,
    layout: Layout,
    *,
    privacy: str,
    asynchronous: bool,
    cohort: int,
    fewest: int,
) -> None:
    """Whether rounds of a training can have this rule, and so many secure groups (0: none).

    Arguments:
        manifest: the bundle's.
        layout: of the uploads.
        cohort: the most devices of a round.
        fewest: the fewest devices whose updates a round without groups may come to.

    Raises PolicyError that names the setting and the remedy.
    """
    if groups and privacy != "secure":
        raise PolicyError("secure_groups: are of secure rounds, and privacy is 'plain'")
    if asynchronous and (settings.robust or groups):
        raise PolicyError(
            "mode: asynchronous rounds add up updates of several versions; robust rules and secure groups need updates "
            "of one"
        )
    least = manifest.privacy.min_cohort
    if groups and cohort // groups < least:
        raise PolicyError(
            f"secure_groups: {groups} groups of a cohort of {cohort} have {cohort // groups} devices, and the bundle's "
            f"policy asks for {least} (min_cohort) in each"
        )
    if settings.robust:
        _check_rule(settings, groups, manifest, layout, privacy, fewest)
    if settings.robust or groups:
        check_memory(settings, (groups or cohort) + (settings.rule == ROOTED), layout)


def least_parts(settings: Aggregation) -> int:
    """With how few updates, or secure groups, a round of this rule ends well."""
    return max(RULES[settings.rule].least(settings.tolerated), 1) if settings.robust else 1


def _check_rule(
    settings: Aggregation, groups: int, manifest: Manifest, layout: Layout, privacy: str, fewest: int
) -> None:
    name = f"aggregation {settings.rule!r}"
    if privacy == "secure" and not groups:
        raise PolicyError(
            f"{name}: needs single updates, which secure rounds hide; set privacy to 'plain', or secure_groups for a "
            "rule over the sums of groups"
        )
    parts, needed = groups or fewest, RULES[settings.rule].least(settings.tolerated)
    if parts < needed:
        raise PolicyError(
            f"{name}: {parts} updates a round are too few to tolerate {settings.tolerated}; it needs {needed} or more"
        )
    if not strategies.get(manifest.strategy).averages:
        raise PolicyError(
            f"{name}: what devices of strategy {manifest.strategy!r} send, divided by their weights, are no answers to "
            "the same question, so a rule cannot tell which are arbitrary; use another strategy, or the mean"
        )
    if any(isinstance(port.carries, Largest) for port in layout.updates):
        raise PolicyError(
            f"{name}: compress 'top_k' has each device send elements of its own choice and zeros for the others, so "
            "honest updates have little in common; use compress 'random_k' or 'rotation', or the mean"
        )
    if any(isinstance(port, Noise) for program in manifest.programs.values() for port in program.inputs):
        # Guerraoui et al. 2021, "Differential privacy and Byzantine resilience in SGD: do they add up?"
        raise PolicyError(
            f"{name}: the bundle's devices add noise, in which honest updates differ as much as arbitrary ones, so a "
            "rule cannot tell them apart; use the mean"
        )
