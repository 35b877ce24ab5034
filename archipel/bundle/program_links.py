"""The rules of a manifest about programs that read or repeat others, outputs that go together, and metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from archipel.bundle.roles import Feature, Metric, Port, Prediction, Program, Update, role_of
from archipel.errors import ManifestError

PER_STEP = ("example", "label", "example_weight", "feature", "noise")
"""Roles of inputs that differ from step to step, so that a program of several steps reads one of them for each."""


def validate_links(programs: Mapping[str, Program]) -> None:
    """Check features, predictions, repeated programs and metrics of rounds. Raises ManifestError."""
    _validate_features(programs)
    _validate_predictions(programs)
    _validate_metrics(programs)
    for name, program in programs.items():
        if program.repeats:
            _validate_repeats(name, program, programs)


def validate_moments(where: str, program: Program) -> None:
    """Check the update entries of running statistics: they come in pairs. Raises ManifestError."""
    updates = [port for port in program.outputs if isinstance(port, Update)]
    moments = [port for port in updates if port.kind in ("mean", "variance")]
    if moments and program.kind != "finish":
        raise ManifestError(f"{where}: update {moments[0].name!r}: only finish uploads running statistics")
    means = {port.tensor: port for port in moments if port.kind == "mean"}
    for port in updates:
        here = f"{where}: update {port.name!r}"
        if port.kind != "variance":
            if port.mean:
                raise ManifestError(f"{here}: mean is of a variance, this is a {port.kind}")
            continue
        # Each mean goes with one variance: the server needs both for the variance of all examples.
        mean = means.pop(port.mean, None)
        if mean is None or mean.shape != port.shape:
            raise ManifestError(f"{here}: {port.mean!r} is no mean of shape {list(port.shape)} that it alone goes with")
    if means:
        raise ManifestError(f"{where}: update {next(iter(means.values())).name!r}: no variance goes with this mean")
    for port in moments:
        if port.clip is not None or port.noise:
            raise ManifestError(f"{where}: update {port.name!r}: a running statistic has no clip and no noise")


def _validate_features(programs: Mapping[str, Program]) -> None:
    sources: dict[str, Port] = {}
    makers = [name for name, program in programs.items() if program.kind == "features"]
    if len(makers) > 1:
        raise ManifestError(f"programs {', '.join(map(repr, sorted(makers)))}: one features program at most")
    for maker in makers:
        sources.update({port.name: port for port in programs[maker].outputs})
    for name, program in programs.items():
        for port in program.inputs:
            if not isinstance(port, Feature):
                continue
            source = sources.get(port.name)
            if source is None:
                raise ManifestError(f"program {name!r}: no features program makes {port.name!r}")
            # Both shapes begin with the batch, whose size or name may differ from program to program.
            shape = port.shape[1:] if program.steps > 1 else port.shape
            if source.dtype != port.dtype or source.shape[1:] != shape[1:] or len(source.shape) != len(shape):
                raise ManifestError(
                    f"program {name!r}: feature {port.name!r} is {port.dtype}{list(shape)}, the features program "
                    f"makes {source.dtype}{list(source.shape)}"
                )


def _validate_predictions(programs: Mapping[str, Program]) -> None:
    makers = [program for program in programs.values() if program.kind == "predict"]
    answers = {port.name: port for port in makers[0].outputs} if len(makers) == 1 else {}
    for name, program in programs.items():
        ports = [port for port in program.inputs if isinstance(port, Prediction)]
        if program.kind == "evaluate" and not ports:
            raise ManifestError(f"program {name!r}: an evaluate program reads at least one prediction")
        for port in ports:
            answer = answers.get(port.output)
            if answer is None:
                raise ManifestError(f"program {name!r}: {port.output!r} is no output of the one predict program")
            if (answer.dtype, len(answer.shape)) != (port.dtype, len(port.shape)) or not _agree(answer, port):
                raise ManifestError(
                    f"program {name!r}: prediction {port.name!r} is {port.dtype}{list(port.shape)}, predict answers "
                    f"{answer.dtype}{list(answer.shape)}"
                )


def _validate_metrics(programs: Mapping[str, Program]) -> None:
    """Check the metrics with a range: devices add them to the sum of a training round."""
    ranges: dict[str, tuple[str, float]] = {}
    for name, program in programs.items():
        for port in program.outputs:
            if not isinstance(port, Metric) or port.range is None:
                continue
            here = f"program {name!r}: metric {port.name!r}"
            if program.kind not in ("train", "finish"):
                raise ManifestError(f"{here}: only metrics of train and finish have a range, not of {program.kind}")
            if not 0 < port.range < math.inf:
                raise ManifestError(f"{here}: range must be above 0 and finite, is {port.range}")
            if program.kind == "train" and port.reduction != "mean":
                raise ManifestError(f"{here}: with a range its reduction must be 'mean', is {port.reduction!r}")
            if program.kind == "finish" and port.range != 1:
                raise ManifestError(f"{here}: it is 0 or 1 of each device, so its range must be 1, is {port.range:g}")
            if ranges.setdefault(port.name, (program.kind, port.range)) != (program.kind, port.range):
                raise ManifestError(f"{here}: another program states another range, or is of another kind")
    # Without noise of their own the metrics would tell about examples that the noise protects, beyond every epsilon.
    noisy = [name for name, program in programs.items() if program.kind in ("train", "finish") and _noisy(program)]
    if ranges and noisy:
        raise ManifestError(
            f"program {noisy[0]!r}: it reads noise, so no metric may have a range: rounds would sum it without noise; "
            f"metric {min(ranges)!r} has one"
        )


def _noisy(program: Program) -> bool:
    return any(role_of(port) == "noise" for port in program.inputs)


def _agree(answer: Port, port: Port) -> bool:
    # The size of a symbolic axis is known only when the programs run.
    sizes = zip(answer.shape, port.shape, strict=True)
    return all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def _validate_repeats(name: str, program: Program, programs: Mapping[str, Program]) -> None:
    where = f"program {name!r}"
    single = programs.get(program.repeats)
    if single is None or single.kind != "train" or single.steps != 1:
        raise ManifestError(f"{where}: repeats {program.repeats!r}, which is not a train program of 1 step")
    for side, expected, ports in (
        ("inputs", single.inputs, program.inputs),
        ("outputs", single.outputs, program.outputs),
    ):
        if [_stacked(port, program.steps) for port in expected] != list(ports):
            raise ManifestError(f"{where}: its {side} are not those of {program.repeats!r}, {program.steps} times")


def _stacked(port: Port, steps: int) -> Port:
    per_step = isinstance(port, Metric) or role_of(port) in PER_STEP
    return msgspec.structs.replace(port, shape=(steps, *port.shape)) if per_step else port
