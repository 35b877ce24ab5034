"""Central differential privacy: Gaussian noise on a cohort's sum, added by the server before anybody sees it.

The unit is a device. Its update is clipped in its own signed graph, and its own runtime checks that and rounds it to
whole steps (protocol.vector), so it changes the sum of whole numbers by a vector of an L2 norm of at most

    D = clip (1 + SLACK) / step + sqrt(n) / 2         (n elements, each rounded by half a step at most)

whatever other devices do. The server adds discrete Gaussian noise of standard deviation `multiplier` D to each element,
in whole numbers (Canonne, Kamath and Steinke 2020, theorems 4 and 14), and only then decodes. With mechanism
"correlated" it takes back a part of earlier rounds' noise besides (archipel.privacy.correlated). Neighbours are a round
with the device's update, and the same round with zeros in its place, so the number of devices may be known.

Noise can make the sum longer than any that devices can send. It is then shortened to the longest of those, which is
post-processing and costs nothing, so all further checks of servers and devices (protocol.bounds,
strategies.step_limits, the weights log) hold as without noise.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Manifest
from archipel.errors import PolicyError
from archipel.privacy.calibration import least_multiplier
from archipel.privacy.correlated import correlate, rounds_event, settle_coefficients, spread, unit_of
from archipel.privacy.events import Event, Gaussian, Repeated
from archipel.protocol.bounds import SLACK, Group, entries, joint_norm, step, sum_bound
from archipel.protocol.metrics.training_metrics import CLIPPED, DEVICES, UPDATE_CLIP
from archipel.protocol.mistakes import tell
from archipel.protocol.noised.group import noised_group
from archipel.protocol.operator.aggregation import Aggregation
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.uploads import clip_input, upload_program
from archipel.protocol.vector import DecodedSum, Layout, Vector

Randomness = Callable[[int], bytes]
Noise = NDArray[np.int64]
_BELOW = 1 - 1e-9
"""A shortened sum stays below its bound in floating point, too."""


def check_composition(
    settings: DifferentialPrivacy,
    manifest: Manifest,
    layout: Layout,
    *,
    privacy: str,
    mode: str,
    aggregation: Aggregation,
    secure_groups: int,
    hyperparameters: Mapping[str, float],
) -> None:
    """Whether rounds of a training can have this noise. Raises PolicyError that names the settings and the remedies.

    Arguments:
        manifest: the bundle's.
        layout: of its uploads.
        hyperparameters: of the task.
    """
    if not settings.is_private:
        return
    name = f"mechanism {settings.mechanism!r}"
    mistakes = rounds_mistakes(
        settings, privacy=privacy, mode=mode, aggregation=aggregation, secure_groups=secure_groups
    )
    adapted = clip_input(upload_program(manifest, "training")) is not None and UPDATE_CLIP not in hyperparameters
    if adapted and settings.clip_noise is None:
        mistakes.append(
            f"{name}: the bundle's clip follows counts of devices, which have no noise; fix the clip: "
            f"hyperparameters.{UPDATE_CLIP} = 1.0, say, or the strategy option clip of the bundle"
            + ("; or set clip_noise (a twentieth of the cohort, say)" if settings.mechanism == "central" else "")
        )
    if settings.clip_noise is not None and not adapted:
        mistakes.append(
            f"{name}: clip_noise is for a clip that the server adapts, and this one is fixed; leave it away, or the "
            f"strategy option clip and hyperparameter {UPDATE_CLIP!r}"
        )
    try:
        noised_group(layout, manifest.strategy, settings.mechanism)
    except PolicyError as error:
        mistakes.append(str(error))
    if mistakes:
        raise PolicyError(tell(mistakes))


def rounds_mistakes(
    settings: DifferentialPrivacy,
    *,
    privacy: str,
    mode: str,
    aggregation: Aggregation,
    secure_groups: int,
) -> list[str]:
    """Why rounds of such settings cannot have this noise, whatever the bundle: each text names settings and remedy."""
    if not settings.is_private:
        return []
    mistakes, local = [], settings.mechanism == "local"
    if local and privacy != "plain":
        mistakes.append(
            "each device adds noise enough for a server that sees its update, which in secure rounds none does; take "
            "'distributed', or set privacy to 'plain'"
        )
    if not local and privacy != "secure":
        mistakes.append("noise is added to whole numbers, which secure rounds sum; set privacy to 'secure'")
    if mode == "asynchronous":
        mistakes.append(
            "a device may be in one version of an asynchronous task several times; set mode to 'semi-synchronous' or "
            "'synchronous'"
        )
    # Of updates that have their noise already, a rule may make what it likes.
    if (aggregation.robust and not local) or secure_groups:
        mistakes.append(
            "how much one device changes what a robust rule or several groups give is not known; leave aggregation "
            "and secure_groups away"
        )
    return [f"mechanism {settings.mechanism!r}: {each}" for each in mistakes]


def settle(settings: DifferentialPrivacy, rounds: int, before: tuple[Event, ...] = ()) -> DifferentialPrivacy:
    """The settings with a noise multiplier: their own, or the least with which so many rounds cost at most epsilon.
    Correlated noise gets its coefficients besides, where it has none.

    `before`: events that the target includes. Raises PolicyError where no noise is enough, MissingExtraError without
    dp-accounting.
    """
    settings = settle_coefficients(settings, rounds)
    if not settings.is_private or settings.noise_multiplier is not None or settings.epsilon is None:
        return settings
    if settings.is_correlated:
        # All rounds together cost as much as a single one with so much less noise.
        found = least_multiplier(settings.epsilon, settings.delta, 1, before=before) * spread(settings, rounds)
    else:
        counts = [] if settings.clip_noise is None else [_repeated(settings.clip_noise, rounds)]
        found = least_multiplier(settings.epsilon, settings.delta, rounds, before=(*before, *counts))
    # Rounded up, so that what is stored and shown is what was added.
    return msgspec.structs.replace(settings, noise_multiplier=math.ceil(found * 1e6) / 1e6)


def events_of(settings: DifferentialPrivacy, first: int, count: int = 1) -> list[Event]:
    """What `count` sums with settled settings cost, of which the first one is number `first` of its task, from 0 on.

    No sampling is assumed, since a round takes whoever checks in.
    """
    if settings.noise_multiplier is None:
        raise PolicyError("noise_multiplier: is not settled yet")
    if settings.is_correlated:
        return rounds_event(settings, first, count)
    if not count:
        return []
    # A device changes the count of those that clipped by 1 at most.
    multipliers = [settings.noise_multiplier, *([] if settings.clip_noise is None else [settings.clip_noise])]
    return [_repeated(multiplier, count) for multiplier in multipliers]


def _repeated(multiplier: float, count: int) -> Event:
    one = Gaussian(noise_multiplier=multiplier)
    return Repeated(event=one, count=count) if count > 1 else one


def draw_noise(
    settings: DifferentialPrivacy,
    layout: Layout,
    past: Iterable[Noise] = (),
    randomness: Randomness = secrets.token_bytes,
) -> Noise:
    """The noise of a round, for `release_sum`: int64 `[elements]`, in steps.

    With `clip_noise` there is one more element: that of the count of devices which clipped their updates.

    Arguments:
        settings: settled ones.
        layout: of the uploads, with the clip of the round's plan.
        past: what this function returned for the task's earlier sums, the newest first; only for correlated noise, of
            as many sums as there are coefficients, less one.
        randomness: gives as many bytes from a cryptographic generator as it is asked for.

    Raises PolicyError for a layout that `check_composition` refuses, or noise beyond 64 bits.
    """
    group = noised_group(layout, "", settings.mechanism)
    if settings.noise_multiplier is None:
        raise PolicyError("noise_multiplier: is not settled yet")
    size = sum(entries(port) for port in group.ports)
    fresh = _sample(noise_scale(group, settings.noise_multiplier * unit_of(settings)), size, randomness)
    if settings.clip_noise is not None:
        return np.concatenate([fresh, _sample(math.ceil(settings.clip_noise), 1, randomness)])
    return correlate(settings.coefficients, fresh, past) if settings.is_correlated else fresh


def release_sum(total: Vector, layout: Layout, *, cohort: int, modulus_bits: int, noise: Noise) -> DecodedSum:
    """The noisy sum of the cohort's changes, and where there is noise for it the noisy count of devices that clipped
    theirs, from 0 to `cohort`. Metrics and other counts, which have no noise, are not in it.

    Arguments:
        total: uint32 [length], the sum of the unmasked vectors modulo 2^b.
        layout: of the uploads, with the clip of the round's plan.
        cohort: how many devices' vectors are in the sum.
        modulus_bits: b.
        noise: as `draw_noise` returned it for this layout.

    Raises PolicyError for a layout that `check_composition` refuses, ProtocolError and BoundError for a sum that no
    devices can have sent.
    """
    group = noised_group(layout, "", "central")
    exact = layout.decode_sum(total, cohort=cohort, modulus_bits=modulus_bits)
    layout.check_sum(exact, cohort)
    whole = layout.signed_sum(total, cohort=cohort, modulus_bits=modulus_bits)
    deltas: dict[str, NDArray[np.float64]] = {}
    clipped: dict[str, int] = {}
    start = used = 0
    for port in layout.updates:
        stop = start + entries(port)
        if port in group.ports:
            noisy = whole[start:stop] + noise[used : used + stop - start]
            deltas[port.tensor] = np.asarray(noisy * step(port), np.float64).reshape([int(dim) for dim in port.shape])
            used += stop - start
        elif port.name == DEVICES + CLIPPED:
            clipped[port.tensor] = int(whole[start])
        start = stop
    values: dict[str, NDArray[np.float64]] = {}
    if len(noise) == used + 1 and clipped:
        values = {
            name: np.asarray(min(max(count + int(noise[used]), 0), cohort), np.float64)
            for name, count in clipped.items()
        }
        used += 1
    if used != len(noise):
        raise PolicyError(f"noise: has {len(noise)} elements, the changes have {used}")
    most = sum_bound(layout.updates, group, cohort, float(cohort)) * _BELOW
    norm = joint_norm(deltas.values())
    if norm > most:
        deltas = {tensor: array * (most / norm) for tensor, array in deltas.items()}
    return DecodedSum(deltas, values, None)


def sensitivity(group: Group) -> int:
    """D, in steps: the most by which one device changes the sum, in the L2 norm."""
    size = sum(entries(port) for port in group.ports)
    smallest = min(step(port) for port in group.ports)
    return math.ceil(group.bound * (1 + SLACK) / smallest + math.sqrt(size) / 2)


def noise_scale(group: Group, multiplier: float) -> int:
    """The standard deviation of the noise, in steps, rounded up to a whole number."""
    return max(math.ceil(multiplier * sensitivity(group)), 1)


def _sample(scale: int, count: int, randomness: Randomness) -> Noise:
    # Imported where noise is drawn: with it comes the device's runtime.
    from archipel.lite_runtime.many_samples import sample_gaussian

    return sample_gaussian(scale, count, randomness)
