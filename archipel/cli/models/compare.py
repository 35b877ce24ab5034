"""`archipel compare`: compare two forms of a model value by value, and find where they diverge."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

from archipel.cli.input_output.arrays import read_arrays
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.models.bundles import Predicting, read_predict
from archipel.datasets.entry_names import LABELS
from archipel.errors import CommandError, CompressionError

if TYPE_CHECKING:
    from archipel.compression.compare import Comparison, Row
    from archipel.graph import Model


@click.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), required=True,
              help=".npy (the only input) or .npz (an entry for each input of A, and `label` for labels).")  # fmt: skip
@keys_for_bundles
@click.option("--weights-a", type=click.Path(path_type=Path),
              help="Learned parameters of the bundle A (FILE of `archipel task download`).")  # fmt: skip
@click.option("--weights-b", type=click.Path(path_type=Path), help="The same for B.")
@click.option("--rows", type=click.IntRange(0), default=256, show_default=True,
              help="Examples for the inner values; outputs and accuracy use all examples.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1), help="Print at most this many inner values. Default: all.")
@click.option("--threshold", type=float, default=20.0, show_default=True,
              help="Signal-to-noise ratio in dB below which a value counts as diverged.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(1), default=16, show_default=True, help="Examples in one run.")
@click.option("--html", type=click.Path(path_type=Path), help="Write one page with the table and a bar chart.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def compare(
    a: Path,
    b: Path,
    data: Path,
    key_files: tuple[Path, ...],
    weights_a: Path | None,
    weights_b: Path | None,
    rows: int,
    layers: int | None,
    threshold: float,
    batch_size: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Compare two forms of a model value by value, such as the float form A and the int8 form B that was made of it.

    \b
    archipel compare float.onnx int8.onnx --data test.npz
    archipel compare digits.bundle small.bundle --key publisher.pub --data test.npz --html report.html
    archipel compare digits.bundle digits.bundle --weights-b task.safetensors --key publisher.pub --data test.npz

    A and B are ONNX files, bundles, slots, or models that `archipel fit --save` wrote. The command compares every
    value that both compute: cosine and signal-to-noise ratio (dB), outputs first. It matches values by name, and layers
    by the names of their weights; integers count as the float numbers that they stand for. 20 dB is noise of a tenth of
    the signal's amplitude; outputs that noisy begin to cost accuracy. Values that a recipe rescales on purpose
    (equalised layers) differ without harm: look at the outputs.

    With labels in the data it also prints the accuracy of both, and the difference with a paired 95% interval.
    """
    from archipel.graph import Model as _  # noqa: F401  (first: its error names the extra that is missing)
    from archipel.compression.compare import compare as run  # isort: skip

    if math.isnan(threshold):
        raise CommandError("--threshold nan: expected a number of dB, such as 20")
    with tempfile.TemporaryDirectory() as folder:
        first = read_predict(a, key_files, weights_a, folder)
        second = read_predict(b, key_files, weights_b, folder)
        fields = _fields(data, first.model, _label_names(first, second))
        try:
            result = run(first.model, second.model, fields, rows=rows, threshold=threshold, batch_size=batch_size,
                         progress=_progress())  # fmt: skip
        except CompressionError as error:
            raise CommandError(f"{a} and {b} on {data}: {error}") from None
    if html is not None:
        from archipel.cli.models.compare_page import write_page

        write_page(result, a.name, b.name, html)
    if as_json:
        click.echo(json.dumps({"a": str(a), "b": str(b), **result.to_dict()}, allow_nan=False))
        return
    click.echo(text(result, a.name, b.name, layers))
    if html is not None:
        click.echo(f"written to {html}")


def text(result: Comparison, a: str, b: str, layers: int | None = None) -> str:
    """The result as text: every output, at most `layers` of the inner values (None: all), and the summary."""
    inner = [row for row in result.rows if not row.output]
    # Outputs always: a large difference inside may not matter to them.
    shown = [*result.outputs, *inner[:layers]]
    names = [
        ("output " if row.output else "")
        + (row.name if row.name == row.counterpart else f"{row.name} = {row.counterpart}")
        for row in shown
    ]
    # Exporters write long names, and the next column begins after the longest.
    width = max(map(len, names), default=0) + 2
    lines = [f"{b} against {a}: {result.examples} examples, inner values on {result.compared}", "",
             f"{'SNR dB':>8}{'cosine':>12}{'largest':>11}  {'value':<{width}}computed by"]  # fmt: skip
    for row, name in zip(shown, names):
        if row.cosine is None and row.reason and row.snr_db is None:
            lines.append(f"{'-':>8}{'-':>12}{'-':>11}  {name:<{width}}{row.layer}  {row.reason}")
            continue
        cosine = "-" if row.cosine is None else f"{row.cosine:.6f}"
        lines.append(f"{decibels(row):>8}{cosine:>12}{row.largest or 0:>11.3g}  {name:<{width}}{row.layer}"
                     + (f"  {row.reason}" if row.reason else ""))  # fmt: skip
    if len(inner) > len(shown) - len(result.outputs):
        lines.append(f"{'':>8}... and {len(inner) - (layers or 0)} more values; --layers shows more")
    if result.unmatched:
        lines.append(f"{'':>8}{len(result.unmatched)} values of {a} are not in {b}: {_first_names(result.unmatched)}")
    return "\n".join([*lines, "", *summary(result)])


def summary(result: Comparison) -> list[str]:
    """Lines with the first layer that diverges, the agreement and the accuracy."""
    first = result.first_divergence
    if first is None:
        lines = [f"nothing diverges: no value is below {result.threshold:g} dB"]
    else:
        lines = [f"first to diverge (below {result.threshold:g} dB): {first.layer}, value {first.name}, "
                 f"{decibels(first)} dB"]  # fmt: skip
        # An inner value that diverges does no harm where every output is above the threshold again.
        recovered = [row for row in result.outputs if row.snr_db is not None and row.snr_db >= result.threshold]
        if not first.output and recovered and len(recovered) == len(result.outputs):
            lines.append("the outputs do not: a recipe rescaled that layer, or later layers make up for the difference")
    if result.agreement is not None:
        lines.append(f"the same class: {result.agreement:.2%}")
    if result.accuracy is not None:
        accuracy = result.accuracy
        lines.append(
            f"accuracy: {accuracy.a:.2%} -> {accuracy.b:.2%}, {100 * accuracy.difference:+.2f} points, 95% interval "
            f"[{100 * accuracy.low:+.2f}, {100 * accuracy.high:+.2f}] ({accuracy.labels} labels; {accuracy.method})"
        )
    return lines


def decibels(row: Row) -> str:
    """The signal-to-noise ratio of a row as tables show it."""
    if row.snr_db is None:
        return "-"
    return "equal" if row.snr_db == math.inf else f"{row.snr_db:.1f}"


def _label_names(*models: Predicting) -> list[str]:
    return list(dict.fromkeys([*(model.label for model in models if model.label is not None), *LABELS]))


def _fields(path: Path, model: Model, labels: list[str]) -> dict[str, np.ndarray]:
    """The arrays for the model's inputs and "label". Raises CommandError that names the file."""
    names = [info.name for info in model.inputs]
    data = read_arrays(path)
    if isinstance(data, np.ndarray):
        if len(names) != 1:
            raise CommandError(f"{path}: one array, but the model has the inputs {', '.join(names)}; give an .npz")
        data = {names[0]: data}
    missing = [name for name in names if name not in data]
    others = [name for name in data if name not in names and name not in labels]
    if missing and len(names) == len(others) == 1:
        # One array that is no label, and one input: the array is for it, whatever its name.
        data = {**data, names[0]: data[others[0]]}
    elif missing:
        raise CommandError(f"{path}: no entry {missing[0]!r}, which is an input; it has {', '.join(sorted(data))}")
    fields = {name: data[name] for name in names}
    label = _first_array(data, [name for name in labels if name not in names])
    return fields if label is None else {**fields, "label": label}


def _first_array(data: Mapping[str, np.ndarray], names: list[str]) -> np.ndarray | None:
    return next((data[name] for name in names if name in data), None)


def _progress() -> Callable[[int, int], None] | None:
    if not sys.stderr.isatty():
        return None
    return lambda done, total: click.echo(f"\r{done} of {total} examples" + "\n" * (done == total), err=True, nl=False)


def _first_names(names: tuple[str, ...], count: int = 6) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} others" if len(names) > count else "")
