"""`archipel run`: predict with a bundle, or evaluate it, on arrays in files."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from archipel.bundle import Bundle, Program
from archipel.bundle.graphs.precision import graph_precision
from archipel.bundle.roles import Example, ExampleWeight, Label
from archipel.cli.devices.fit_table import evaluation_means
from archipel.cli.devices.variant_limits import VariantLimits, variant_limits
from archipel.cli.input_output.arrays import check_fields, read_fields, write_arrays
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.input_output.sources import learned_weights, open_runtime
from archipel.errors import CommandError, IndexRangeError, RuntimeInputError
from archipel.lite_runtime import ModelRuntime, Runtime
from archipel.lite_runtime.evaluation import evaluation_fields
from archipel.lite_runtime.learned import is_model_file
from archipel.lite_runtime.out_of_range import locate
from archipel.lite_runtime.training.driver import need_program

DELEGATES = click.option(
    "--delegate",
    "delegates",
    multiple=True,
    help="Execution provider (cpu, coreml, cuda, xnnpack ...) or engine (openvino, torch, torch:cuda:1); give several "
    "in order. Default: auto.",
)
_SHOWN = 10


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@keys_for_bundles
@learned_weights
@click.option("--input", "inputs", type=click.Path(path_type=Path), required=True,
              help=".npy (the only field) or .npz (an entry for each field), first axis = examples.")  # fmt: skip
@click.option(
    "--labels", type=click.Path(path_type=Path), help="The labels for --evaluate, if they are not in --input."
)
@click.option(
    "--evaluate",
    is_flag=True,
    help="Compare the predictions with the labels and print the metrics, as means.",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write all outputs to this .npz.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Examples in one run.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads for one operator.")
@DELEGATES
@variant_limits
def run(
    bundle: Path,
    key_files: tuple[Path, ...],
    weights: Path | None,
    inputs: Path,
    labels: Path | None,
    evaluate: bool,
    output: Path | None,
    batch_size: int,
    threads: int,
    delegates: tuple[str, ...],
    limits: VariantLimits,
) -> None:
    """Predict with BUNDLE (a file, a folder, or a model that `archipel fit --save` wrote) on arrays in a file.

    \b
    archipel run digits.bundle --input x.npy --output out.npz
    archipel run digits.bundle --key publisher.pub --input test.npz --evaluate
    archipel run digits.bundle --key publisher.pub --weights task.safetensors --input test.npz --evaluate

    The command verifies the bundle first. An ONNX file, which may stand in its place, needs no key. An .npz has an
    entry for each of the bundle's fields; `archipel inspect` shows them. --evaluate measures what `predict` answers,
    with its rounding where it has some, and never the float programs that train.

    BUNDLE may also be a release, the folder of `archipel convert --variants`: then the command takes the best variant
    within --max-bytes, --max-memory and --max-latency, and says which and why.

    \b
    archipel run digits --key publisher.pub --input x.npy --max-bytes 200000 --max-latency 5
    """
    if evaluate and output is not None:
        raise CommandError("--output is for predictions; --evaluate only prints metrics")
    if labels is not None and not evaluate:
        raise CommandError("--labels is for --evaluate")
    if evaluate and is_model_file(bundle):
        raise CommandError(f"--evaluate: {bundle} has no metrics; make a bundle of it with `archipel convert --loss`")
    with tempfile.TemporaryDirectory() as folder:
        choice = limits.choose(
            bundle, key_files, Path(folder), threads=threads, delegates=delegates, allow_development=True
        )
        if choice is not None:
            click.echo(f"archipel: {choice}", err=True)
            bundle = choice.bundle.folder
        runtime = open_runtime(bundle, key_files, folder, threads, delegates, weights)
        if evaluate:
            for name, value in _means(runtime, inputs, labels, batch_size).items():
                click.echo(f"{name:<16}{value:.6g}")
            # On stderr, so that standard output has the results alone.
            click.echo(f"measured: means of {deployed(runtime.bundle)}", err=True)
            _print_delegates(runtime, delegates)
            return
        outputs = predict(runtime, inputs, batch_size)
        if output is not None:
            write_arrays(output, outputs)
        for name, array in outputs.items():
            click.echo(f"{name}: {array.dtype}{list(array.shape)}  {_summary(array)}")
            if array.ndim == 2 and array.shape[1] > 1:
                click.echo(f"  {_classes(array)}")
        if output is not None:
            click.echo(f"written to {output}")
        _print_delegates(runtime, delegates)


def deployed(bundle: Bundle) -> str:
    """What evaluations measure, in words, with its precision. Raises RuntimeProgramError without `predict`."""
    program = bundle.program(need_program(bundle, "predict", "predict"))
    return f"what predict answers ({graph_precision((bundle.folder / program.file).read_bytes())})"


def predict(runtime: ModelRuntime, path: Path, batch_size: int) -> dict[str, np.ndarray]:
    """Predict all examples of a file in batches.

    Arguments:
        runtime: the model.
        path: an .npy or .npz file with the fields of its `predict` program.
        batch_size: examples in one run; a program with a fixed batch decides for itself, and one whose inputs and
            outputs do not all begin with the batch runs once.

    Returns:
        Arrays by output name, `[examples, ...]` but for those programs.

    Raises:
        CommandError: the arrays do not fit; the message names the file.
    """
    program = runtime.bundle.program(need_program(runtime.bundle, "predict", "predict"))
    ports = [port for port in program.inputs if isinstance(port, Example)]
    arrays = read_fields(path, ports)
    check_fields(path, ports, arrays, Example)
    fields = {port.name: arrays[port.name] for port in ports}
    batches = _batches(path, program, fields, batch_size)
    try:
        parts = [runtime.predict(batch) for batch in batches]
    except IndexRangeError as error:
        # Rows of the file, not of a batch.
        raise CommandError(f"{path}: {locate(error, runtime.bundle, fields)}") from None
    except RuntimeInputError as error:
        raise CommandError(f"{path}: {error}") from None
    if len(parts) == 1:
        return dict(parts[0])
    for name, array in parts[0].items():
        if array.ndim == 0 or len(array) != len(next(iter(batches[0].values()))):
            raise CommandError(
                f"{path}: output {name!r} has another first axis than the examples, {list(array.shape)}, so the "
                "answers of several batches cannot be joined; give --batch-size the number of all examples"
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _batches(path: Path, program: Program, fields: Mapping[str, np.ndarray], size: int) -> list[dict[str, np.ndarray]]:
    """The examples in parts of `size`, or all at once where inputs or outputs have no common first axis."""
    firsts = {port.shape[0] if port.shape else None for port in program.inputs if isinstance(port, Example)}
    others = {port.shape[0] if port.shape else None for port in program.outputs} - firsts
    # An output without the examples' axis is a number for the whole batch, or a state [layers, batch, width]. An output
    # whose first size has another name may have the batch all the same: exporters name one size twice.
    if len(firsts) > 1 or None in firsts or any(not isinstance(first, str) for first in others):
        return [dict(fields)]
    counts, [first] = {len(array) for array in fields.values()}, firsts
    if len(counts) != 1 or 0 in counts:
        sizes = ", ".join(f"{name} {len(array)}" for name, array in fields.items())
        raise CommandError(f"{path}: expected the same number of examples in every field, at least 1; got {sizes}")
    [count] = counts
    if isinstance(first, int):
        # A graph that was exported with a fixed batch takes no other, not even for the last examples.
        size = first
        if count % size:
            raise CommandError(f"{path}: the bundle predicts {size} examples at a time; give a multiple of that")
    return [{name: array[at : at + size] for name, array in fields.items()} for at in range(0, count, size)]


def _means(runtime: ModelRuntime, path: Path, labels: Path | None, batch_size: int) -> dict[str, float]:
    ports = evaluation_fields(runtime.bundle)
    arrays = read_fields(path, ports)
    check_fields(path, ports, arrays, Example, ExampleWeight)
    if labels is not None:
        arrays.update(read_fields(labels, ports, Label))
    check_fields(labels or path, ports, arrays, Label)
    program = runtime.bundle.program(need_program(runtime.bundle, "evaluate", "evaluate"))
    count = len(next(iter(arrays.values())))
    try:
        return evaluation_means(program, runtime.evaluate(arrays, batch_size=batch_size), count)
    except (RuntimeInputError, IndexRangeError) as error:
        raise CommandError(f"{path}: {error}") from None


def _print_delegates(runtime: Runtime, delegates: Sequence[str]) -> None:
    # On stderr, so that standard output has the results alone. Without --delegate nobody asked.
    if delegates:
        click.echo(runtime.delegate_report().table(), err=True)


def _summary(array: np.ndarray) -> str:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return f"{int((~np.isfinite(array)).sum())} elements are not finite"
    return f"from {array.min():.4g} to {array.max():.4g}, mean {array.mean(dtype=np.float64):.4g}"


def _classes(array: np.ndarray) -> str:
    """The index of the largest number in each of the first rows, and how often each index is that of all rows."""
    largest = array.argmax(axis=1).tolist()
    first = " ".join(map(str, largest[:_SHOWN])) + (" ..." if len(largest) > _SHOWN else "")
    counts = ", ".join(f"{each}: {count}" for each, count in sorted(Counter(largest).items())[:_SHOWN])
    return f"largest: {first}   ({counts})"
