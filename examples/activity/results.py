"""What was measured, and the table that shows it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from origin import Origin

from archipel.cli.start.demo.measure import paired_interval

MODELS = ("cloud", "federated", "personalised", "cloud, personalised")


class Person(msgspec.Struct):
    """`rounds` whose sums have this person's update, `sent` bytes in them; `earlier` windows to learn from and `later`
    ones to measure on; whether the phone `adopted` the federated version; `correct` answers on the later windows, by
    model: "personalised" is made of the version that the phone runs."""

    person: int
    group: str
    rounds: int
    sent: int
    earlier: int
    later: int
    adopted: bool
    correct: dict[str, int]

    def accuracy(self, model: str) -> float:
        return self.correct[model] / self.later


class Round(msgspec.Struct):
    """A committed round: `devices` of `assigned` are in its sum."""

    number: int
    assigned: int
    devices: int
    seconds: float


class Run(msgspec.Struct):
    """`secure`: accuracy over all later windows, by model, as a secure sum told it to the server."""

    seed: int
    people: list[Person]
    rounds: list[Round]
    secure: dict[str, float]
    seconds: float
    peak_memory: int  # bytes, all processes together

    def accuracies(self, model: str, group: str = "") -> np.ndarray:
        """One for each person (of this group), 0..1."""
        return np.array([each.accuracy(model) for each in self.people if _is_of(each, group)])

    def over_windows(self, model: str) -> float:
        """Over all later windows of all people."""
        return sum(each.correct[model] for each in self.people) / sum(each.later for each in self.people)


class Results(msgspec.Struct):
    """What results.json holds."""

    origin: Origin
    runs: list[Run]


def _is_of(person: Person, group: str) -> bool:
    return not group or person.group == group or (group == "took part" and person.group != "newcomer")


def people_table(runs: Sequence[Run]) -> str:
    """Markdown: a row for each person, means over the runs, in percent."""
    lines = _heading(("person", "group", "windows to learn, to measure", "rounds"))
    for index, person in enumerate(runs[0].people):
        each = [run.people[index] for run in runs]
        groups = sorted({one.group for one in each}, key=lambda name: name != "volunteer")
        group = groups[0] if len(runs) == 1 else "newcomer" if groups == ["newcomer"] else "took part"
        rounds = np.mean([one.rounds for one in each])
        values = [float(100 * np.mean([one.accuracy(model) for one in each])) for model in MODELS]
        lines.append(
            _row(f"{person.person}", group, f"{person.earlier}, {person.later}", f"{rounds:.3g}", *map(_figure, values))
        )
    return "\n".join(lines)


def summary_table(runs: Sequence[Run]) -> str:
    """Markdown: mean person and worst person of each group; over several runs the mean and from where to where."""
    lines = _heading(("people", "which"))
    for name, group in (("all", ""), ("took part", "took part"), ("newcomers", "newcomer")):
        for which, reduce in (("mean", np.mean), ("worst person", np.min)):
            values = [[100 * reduce(run.accuracies(model, group)) for run in runs] for model in MODELS]
            lines.append(_row(name, which, *map(_spread, values)))
    return "\n".join(lines)


def differences(runs: Sequence[Run]) -> str:
    """Lines: paired differences of means over the runs, with intervals that resample people."""
    lines = []
    for better, worse in (
        ("federated", "cloud"),
        ("personalised", "federated"),
        ("personalised", "cloud, personalised"),
    ):
        for name, group in (("all", ""), ("newcomers", "newcomer")):
            # A volunteer of one run is another's contributor, so these two groups are the same in all runs.
            pair = [np.mean([run.accuracies(model, group) for run in runs], axis=0) for model in (better, worse)]
            found = paired_interval(pair[0], pair[1], np.ones(len(pair[0])), seed=0)
            lines.append(
                f"{better} - {worse}, {name}: {found.difference:+.1f} points [{found.low:+.1f}, {found.high:+.1f}]"
            )
    return "\n".join(f"- {line}" for line in lines)


def worse_table(runs: Sequence[Run]) -> str:
    """Markdown: everybody whom a step serves worse, means over the runs, in points; the greatest loss first."""
    lines = [_row("person", "step", "from", "to", "points"), "|---|---|---:|---:|---:|"]
    found = []
    for before, after in (
        ("cloud", "federated"),
        ("federated", "personalised"),
        ("cloud, personalised", "personalised"),
    ):
        a, b = (100 * np.mean([run.accuracies(model) for run in runs], axis=0) for model in (before, after))
        step = f"{before} → {after}" if before != "cloud, personalised" else "personalised: of cloud → of federated"
        found += [(b[i] - a[i], each.person, step, a[i], b[i]) for i, each in enumerate(runs[0].people) if b[i] < a[i]]
    lines += [
        _row(f"{who}", step, _figure(a), _figure(b), f"{points:+.1f}") for points, who, step, a, b in sorted(found)
    ]
    return "\n".join(lines)


def report(results: Results) -> str:
    """All of it as Markdown."""
    runs = results.runs
    several = f"{len(runs)} seeds, mean [lowest, highest]" if len(runs) > 1 else "one seed"
    cohorts = [each.devices for run in runs for each in run.rounds]
    phones = f"{min(cohorts)} to {max(cohorts)}" if min(cohorts) < max(cohorts) else f"{cohorts[0]}"
    seconds = np.median([each.seconds for run in runs for each in run.rounds])
    sent = np.mean([each.sent / each.rounds for run in runs for each in run.people if each.rounds])
    memory = max(run.peak_memory for run in runs)
    cost = (
        f"{len(runs[0].rounds)} secure rounds a seed, {phones} phones in each sum; {seconds:.1f} s a round, "
        f"{sent / 1e3:.0f} kB sent by a phone in a round. {' + '.join(f'{run.seconds:.0f}' for run in runs)} s in all, "
        f"{memory / 1e9:.1f} GB of memory for all processes together."
    )
    adopted = ", ".join(f"{sum(each.adopted for each in run.people)}" for run in runs)
    lines = ["Over all later windows together, as secure sums told it to the server:"]
    for run in runs:
        lines.append(f"seed {run.seed}: " + ", ".join(f"{name} {100 * told:.2f}%" for name, told in run.secure.items()))
    parts = (
        f"Measured on {results.origin}",
        f"Accuracy in percent on each person's own later windows; {several}.",
        summary_table(runs),
        "Paired differences, with 95% intervals over people:",
        differences(runs),
        "Whom a step serves worse, in points; means over the seeds:",
        worse_table(runs),
        "Everybody:",
        people_table(runs),
        f"Phones that adopted the federated version, of {len(runs[0].people)}: {adopted}.",
        cost,
        "\n- ".join(lines),
    )
    return "\n\n".join(parts) + "\n"


def _heading(columns: tuple[str, ...]) -> list[str]:
    return [_row(*columns, *MODELS), "|" + "---|" * len(columns) + "---:|" * len(MODELS)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _figure(value: float) -> str:
    return f"{value:.1f}"


def _spread(values: Sequence[float]) -> str:
    middle = _figure(float(np.mean(values)))
    return middle if len(values) == 1 else f"{middle} [{_figure(min(values))}, {_figure(max(values))}]"
