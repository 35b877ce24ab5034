"""Real agents in analytics tasks on bundles that the converter makes of `statistics`, which have no strategy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from msgspec import structs

from archipel import convert
from archipel.cli.main import archipel
from archipel.converter import Analysis, Histogram, Mean, Quantiles, Signing, Sum
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.errors import RefusedError
from tests.support.federation import Federation

EDGES = list(range(0, 241, 5))
BOUNDS = [0.0, 30.0, 60.0, 120.0]


class Minutes(torch.nn.Module):
    """How long each session was, from when it began and when it ended, in seconds."""

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return (times[:, 1] - times[:, 0]) / 60


def sessions(number: int) -> np.ndarray:
    """Beginnings and ends, in seconds: some are longer than what the statistics count, some end before they began."""
    rng = np.random.default_rng(number)
    start = rng.uniform(0, 3600, 40 + number)
    return np.stack([start, start + rng.gamma(2.0, 1800.0, start.size) - 300], axis=1).astype(np.float32)


def minutes() -> np.ndarray:
    times = np.concatenate([sessions(number) for number in range(3)]).astype(np.float64)
    return (times[:, 1] - times[:, 0]) / 60


@pytest.fixture
def usage(federation: Federation) -> Federation:
    """A federation whose bundle is the one of docs/queries.md, with a statistic of every kind."""
    federation.bundle_file = federation.folder / "usage.bundle"
    convert(
        Minutes(),
        federation.bundle_file,
        example=torch.zeros(4, 2),
        analysis=Analysis(
            statistics=[
                Mean(name="mean", low=0, high=240),
                Sum(name="total", low=0, high=240),
                Histogram(name="spread", edges=BOUNDS),
                Quantiles(name="minutes", edges=EDGES, probabilities=[0.5, 0.9]),
            ],
        ),
        # What convert asks for by default are fifteen devices; here are three.
        privacy=structs.replace(DEFAULT_PRIVACY, min_cohort=3, colluders=0.0, min_contributors=3),
        signing=Signing(federation.publisher_key),
    )
    return federation


@pytest.mark.sampled(every=8)
def test_an_analysis_by_the_converter_is_that_of_numpy(usage: Federation) -> None:
    agents = [usage.agent(number, examples=lambda number=number: {"times": sessions(number)}) for number in range(3)]
    task = usage.task(kind="analytics", threshold=None, cohort=3)
    usage.run(agents, lambda: usage.operator.tasks.get(task.task_id).state != "running")
    done = usage.operator.tasks.get(task.task_id)
    assert done.state == "completed", done
    [info] = usage.rounds(task)
    found, values = info.result.statistics, minutes()
    clipped = np.clip(values, 0, 240)
    # Three sums of up to 240 * 1000, each rounded to 24 bits.
    step = 3 * 240 * 1000 / (2**23 - 1)
    assert found["total"].value == pytest.approx(clipped.sum(), abs=step)
    assert found["mean"].value == pytest.approx(clipped.mean(), abs=step / clipped.size)
    assert found["spread"].counts == np.histogram(values, [-np.inf, *BOUNDS, np.inf])[0].tolist()
    assert found["minutes"].counts == np.histogram(values, [-np.inf, *EDGES, np.inf])[0].tolist()
    for share in (0.5, 0.9):
        # Within the bin that holds the quantile of all values together, where nothing lies beyond the edges.
        assert found["minutes"].quantiles[str(share)] == pytest.approx(np.quantile(clipped, share), abs=5)
    shown = show(usage, info.round_id)
    assert f"total                   sum {found['total'].value:.6g}" in shown
    assert f"mean                    mean {found['mean'].value:.6g}" in shown
    assert f"90% are below {found['minutes'].quantiles['0.9']:.6g}" in shown
    counts = np.histogram(values, [-np.inf, *BOUNDS, np.inf])[0]
    lines = [line.split("  ") for line in shown[shown.index("spread\n") :].splitlines()[1:6]]
    bars = [[part.strip() for part in line if part.strip()] for line in lines]
    labels = ["below 0", "0 to 30", "30 to 60", "60 to 120", "from 120"]
    assert [bar[:2] for bar in bars] == [[label, str(count)] for label, count in zip(labels, counts, strict=True)]
    for bar, count in zip(bars, counts, strict=True):
        assert len("".join(bar[2:])) == pytest.approx(40 * count / counts.max(), abs=0.5)


@pytest.mark.sampled(every=4)
def test_such_a_bundle_cannot_be_trained(usage: Federation) -> None:
    with pytest.raises(RefusedError, match="no strategy, so it cannot be trained"):
        usage.task()


def show(usage: Federation, round_id: str) -> str:
    """What `archipel round show` prints."""
    connection = ["--server", f"http://127.0.0.1:{usage.server.port}"]
    environment = {"ARCHIPEL_TOKEN": usage.operator_token}
    done = CliRunner().invoke(archipel, ["round", "show", round_id, *connection], env=environment)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.sampled(every=8)
def test_no_device_counts_more_examples_than_the_task_says(usage: Federation) -> None:
    agents = [usage.agent(number, examples=lambda number=number: {"times": sessions(number)}) for number in range(3)]
    task = usage.task(kind="analytics", bundle=usage.publish(), threshold=None, min_cohort=3, cohort=3, max_examples=10)
    usage.run(agents, lambda: usage.operator.tasks.get(task.task_id).state != "running")
    [info] = usage.rounds(task)
    assert info.result is not None
    assert sum(info.result.statistics["spread"].counts) == 30
