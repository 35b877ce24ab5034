"""Show the results: a table in the terminal and one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from archipel.cli.start.demo.plots import all_plots
from archipel.cli.start.demo.results import Interval, Results, TreeResults, count_committed
from archipel.compression.pages import write_page

PACKAGE = "archipel.cli.start.demo"


def write_report(results: Results, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_page(
        path,
        "report.html",
        PACKAGE,
        title=f"archipel demo, seed {results.seed}",
        r=results,
        plots=all_plots(results),
        cloud=results.score("cloud"),
        federated=results.score("federated"),
        committed=count_committed(results.rounds),
        pct=percent,
        points=points,
    )


def print_results(results: Results, console: Console) -> None:
    """The figures that matter most, as tables."""
    accuracy = Table(title=f"held-out pupils: {results.held_out_writers} writers, {results.held_out_digits:,} digits")
    for column in ("model", "measured on", "accuracy", "paired difference, 95% interval"):
        accuracy.add_column(column, justify="right" if column == "accuracy" else "left")
    for scores, where in ((results.scores, "all digits"), (results.halves, "second halves")):
        for score in scores:
            difference = f"{points(score.interval)} against {score.against}" if score.interval else ""
            accuracy.add_row(score.name, where, percent(score.accuracy), difference)
    console.print(accuracy)
    forms = Table(title=f"one model, two forms (they agree on {percent(results.agreement)})")
    for column in ("form", "file", "latency, batch 1", "accuracy"):
        forms.add_column(column, justify="left" if column == "form" else "right")
    for form in results.forms:
        forms.add_row(form.name, kilobytes(form.bytes), f"{form.microseconds:.0f} µs", percent(form.accuracy))
    console.print(forms)
    rounds = Table(title="secure rounds")
    for column in ("round", "ended", "seconds", "in the sum", "left", "accuracy"):
        rounds.add_column(column, justify="left" if column == "ended" else "right")
    for row in results.rounds:
        ended = row.phase if not row.reason else f"{row.phase}: {row.reason}"
        accuracy_text = "" if row.accuracy is None else percent(row.accuracy)
        rounds.add_row(
            str(row.number), ended, f"{row.seconds:.1f}", str(len(row.survivors)), str(len(row.dropped)), accuracy_text
        )
    console.print(rounds)
    if results.tree is not None:
        _print_tree(results.tree, console)
    sent = [device.sent for device in results.fleet]
    received = [device.received for device in results.fleet]
    if sent:
        console.print(
            f"bytes per device over all rounds: {kilobytes(sum(sent) / len(sent))} sent, "
            f"{kilobytes(sum(received) / len(received))} received on average"
        )
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.stages)
    console.print(f"{results.total_seconds:.0f} s in all ({stages}); peak memory {results.peak_memory / 1e6:.0f} MB")


def _print_tree(tree: TreeResults, console: Console) -> None:
    table = Table(title="edge servers")
    for column in ("edge server", "devices", "rounds", "seconds of its own round", "bytes to and from the root"):
        table.add_column(column, justify="left" if column == "edge server" else "right")
    for edge in tree.edges:
        table.add_row(edge.name, str(edge.devices), str(edge.rounds), f"{edge.seconds:.1f}", kilobytes(edge.bytes))
    console.print(table)
    console.print(
        f"first {tree.compared} rounds: {kilobytes(tree.root_bytes)} at the root and {tree.seconds:.1f} s a round; the "
        f"same devices at one server: {kilobytes(tree.flat_bytes)} and {tree.flat_seconds:.1f} s"
    )
    verdict = "the same, bit for bit" if tree.equal else "different"
    console.print(
        f"round {tree.checked} of {tree.checked_devices} devices, computed again without any server: the model is "
        f"{verdict}"
    )


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def points(interval: Interval) -> str:
    return f"{interval.difference:+.2f} points [{interval.low:+.2f}, {interval.high:+.2f}]"


def kilobytes(count: float) -> str:
    return f"{count / 1e3:,.1f} kB"
