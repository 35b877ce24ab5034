"""The choice of a device: the best variant of a release that fits its owner's limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from archipel.bundle import Bundle, Release, Variant, open_release
from archipel.errors import RuntimeInputError, RuntimeLimitError
from archipel.lite_runtime.latency import published_example, time_prediction
from archipel.lite_runtime.runtime import Runtime

if TYPE_CHECKING:
    from archipel.lite_runtime.engines.delegates import Delegates


@dataclass(frozen=True)
class OwnerLimits:
    """What the device's owner allows; None: whatever it needs.

    Arguments:
        max_bytes: bytes of the variant's file.
        max_memory: bytes of memory that a prediction of one example needs, by the release's signed number. The runtime
            itself and the kernels' scratch space come on top.
        max_latency: seconds of such a prediction, measured on this device.

    Raises RuntimeInputError for a limit that is not above 0.
    """

    max_bytes: int | None = None
    max_memory: int | None = None
    max_latency: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_memory", "max_latency"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise RuntimeInputError(f"{name}: expected a number above 0, got {value}")

    def __str__(self) -> str:
        limits = []
        if self.max_bytes is not None:
            limits.append(f"file of at most {self.max_bytes:,} bytes")
        if self.max_memory is not None:
            limits.append(f"memory of at most {self.max_memory:,} bytes")
        if self.max_latency is not None:
            limits.append(f"latency of at most {_milliseconds(self.max_latency)}")
        return ", ".join(limits)


@dataclass(frozen=True)
class Choice:
    """The variant that a device takes, and its verified `bundle`; `load(choice.bundle.folder, ...)` runs it.

    `why` says in a line what spoke against the better ones.

    Example: see `archipel.lite_runtime.choose`.
    """

    variant: Variant
    bundle: Bundle
    why: str

    def __str__(self) -> str:
        return self.why


def choose(
    path: Path | str,
    trusted_keys: Sequence[bytes],
    *,
    max_bytes: int | None = None,
    max_memory: int | None = None,
    max_latency: float | None = None,
    threads: int = 1,
    delegates: Delegates = "auto",
    cache: Path | str | None = None,
    allow_development: bool = False,
) -> Choice:
    """Take the best variant of a release that fits the owner's limits.

    Arguments:
        path: the folder of the release. Only the bundles that are measured or taken need be in it.
        trusted_keys: publishers' public keys, 32 bytes each, one of which must have signed the release.
        max_bytes, max_memory, max_latency: as for OwnerLimits; latency in seconds. With `max_latency` each variant that
            fits the other limits is run for a third of a second, the best first, until one is fast enough.
        threads, delegates, cache, allow_development: as for `load`; what is measured runs with these.

    Raises:
        RuntimeLimitError: no variant fits; it names all limits, and what each variant needs.
        BundleError, RuntimeInputError: the release, a bundle or a limit is wrong.

    Example:
        choice = choose("digits", trusted, max_bytes=200_000, max_latency=0.005)
        print(choice.why)
        runtime = load(choice.bundle.folder, trusted)
    """
    limits = OwnerLimits(max_bytes, max_memory, max_latency)
    signed = open_release(path, trusted_keys, allow_development=allow_development)
    opened: dict[str, Bundle] = {}

    def measure(variant: Variant) -> float:
        bundle = opened[variant.name] = signed.open(variant.name, cache)
        return measure_latency(bundle, threads=threads, delegates=delegates)

    variant, why = pick(signed.release, limits, measure)
    return Choice(variant, opened.get(variant.name) or signed.open(variant.name, cache), why)


def pick(release: Release, limits: OwnerLimits, measure: Callable[[Variant], float]) -> tuple[Variant, str]:
    """The first variant of the release within the limits, and why in one line.

    `measure` gives the seconds of a prediction, and is called only for variants within the other limits, and only where
    latency is limited. Raises RuntimeLimitError.
    """
    passed: list[str] = []
    for variant in release.variants:
        problem = latency = None
        if limits.max_bytes is not None and variant.bytes > limits.max_bytes:
            problem = f"its file has {variant.bytes:,} bytes"
        elif limits.max_memory is not None and variant.peak_bytes > limits.max_memory:
            problem = f"it needs {variant.peak_bytes:,} bytes of memory"
        elif limits.max_latency is not None:
            latency = measure(variant)
            if not latency <= limits.max_latency:
                problem = f"a prediction takes {_milliseconds(latency)} here"
        if problem is None:
            return variant, _why(release, variant, limits, latency, passed)
        passed.append(f"{variant.name}: {problem}")
    raise RuntimeLimitError(
        f"release {release.name!r}: no variant fits the limits ({limits}): {'; '.join(passed)}; raise a limit, or ask "
        "the publisher for a smaller variant"
    )


def _why(release: Release, variant: Variant, limits: OwnerLimits, latency: float | None, passed: list[str]) -> str:
    needs = f"{variant.bytes:,} bytes, {variant.peak_bytes:,} bytes of memory"
    if latency is not None:
        needs += f", {_milliseconds(latency)} a prediction"
    text = f"variant {variant.name} of {release.name!r} ({needs})"
    if not passed:
        rest = "no limit is given" if limits == OwnerLimits() else f"it is within the limits ({limits})"
        return f"{text}: the best of {len(release.variants)}, and {rest}"
    return f"{text}: the best within the limits ({limits}); not {'; not '.join(passed)}"


def measure_latency(bundle: Bundle, *, threads: int = 1, delegates: Delegates = "auto") -> float:
    """Median seconds of a prediction of one example, or of the batch that a graph with a fixed one takes.

    The example is the first of the bundle's self-test, or zeros. Takes about a third of a second, more for slow models.
    """
    return time_prediction(Runtime(bundle, threads=threads, delegates=delegates), published_example(bundle))


def _milliseconds(seconds: float) -> str:
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"
