"""What a round found out: means, distributions, statistics and counts."""

from __future__ import annotations

from typing import Any, Literal

from archipel.protocol.messages import Message


class Estimate(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A figure of the devices' true values, which differs from `value` by `error` at most: 0 where every value is
    known; null where some device that matters is beyond the bins."""

    value: float
    error: float | None = 0.0


class Distribution(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How a metric is spread over `devices` devices, each of which counts once, however many examples it has.

    `deciles` are the 10% to 90% quantiles, linearly interpolated; `worst` is the mean of the worst tenth of the devices
    (rounded up), "worst" being as the bins say. `counts`: devices below the first of `edges`, between each two (the
    last bin has both its edges), and above the last one.
    """

    devices: int
    mean: Estimate
    deciles: list[Estimate]
    worst: Estimate
    edges: list[float]
    counts: list[int]


class StatisticResult(Message, frozen=True, kw_only=True, omit_defaults=False):
    """`value` of a sum or mean (null: of no examples), `counts` of a histogram: below the first of `edges`, between
    each two, and from the last on; `quantiles` by probability, interpolated within the histogram's bins.

    Example:
        [each] = client.tasks.rounds(analysis_id)
        spread = each.result.statistics["spread"]
        print(spread.edges, spread.counts)  # [-1.0, 0.0, 1.0] [2.0, 4.0, 4.0, 8.0]
    """

    kind: Literal["sum", "mean", "histogram", "quantiles"]
    value: float | None = None
    edges: list[float] = []
    counts: list[float] = []
    quantiles: dict[str, float] = {}


class Adoption(Message, frozen=True, kw_only=True, omit_defaults=False):
    """Of `decided` devices that were offered the version and decided about it, about `taken` took it: the estimate, not
    rounded and from 0 to `decided`, with its standard error. Each device's answer is noisy, so that few devices tell
    little: of 100 the standard error is 8.7, of 10,000 it is 87."""

    decided: int
    taken: float
    standard_error: float


class RoundResult(Message, frozen=True, kw_only=True, omit_defaults=False):
    """What `devices` devices found, of which `contributors` had examples.

    Of an evaluation: `metrics`, means over `examples` examples (each device's number is counted up to the task's
    max_examples); `distributions`, of a metric that the task asks it for, how it is spread over the contributors;
    `clamped`, of a metric that was beyond its range on some devices, the share of the examples that are
    theirs; `adoption`, where the task counts it and at least `min_contributors` of the devices have decided. Of an
    analysis: `values`, the sums by name; `statistics`, what the bundle says that they mean. Of a training: `metrics`,
    such as `training loss`, means over the devices' weights of each device's mean over the steps of its round, and
    `clamped` as above; the numbers of devices whose update was `clipped`, and of those with more examples than their
    weight counts (`capped`; null: the bundle has devices not say it).

    Of an evaluation or analysis with `differential_privacy` all numbers but `devices` have noise, and `noise` says how
    much: its standard deviation in each element of a sum of `values`, and about that in each of the `metrics`.

    Example:
        [each] = client.tasks.rounds(evaluation_id)
        print(each.result.metrics["mse"], "over", round(each.result.examples), "examples")
    """

    devices: int
    contributors: int = 0
    examples: float | None = None
    metrics: dict[str, float] = {}
    distributions: dict[str, Distribution] = {}
    clamped: dict[str, float] = {}
    clipped: int | None = None
    capped: int | None = None
    adoption: Adoption | None = None
    values: dict[str, Any] = {}
    statistics: dict[str, StatisticResult] = {}
    noise: dict[str, float] = {}
