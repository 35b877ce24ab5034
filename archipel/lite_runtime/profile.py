"""Measures the time of a program's kernels with ONNX Runtime's own profiler."""

from __future__ import annotations

import math
import statistics
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.engines.delegates import name_of
from archipel.lite_runtime.engines.onnx_runtime import error_types, onnxruntime, open_exact, program_error
from archipel.lite_runtime.engines.sessions import Sessions
from archipel.lite_runtime.predictor import Predictor
from archipel.lite_runtime.resident import ResidentPeak

# The first runs allocate memory and are slower.
WARMUP = 3
MAX_RUNS = 10_000
# ONNX Runtime stops recording after a million events; one takes about 700 bytes.
MAX_PROFILE_BYTES = 1 << 30

_NODE, _RUN, _SUFFIX = "Node", "model_run", "_kernel_time"


class Row(NamedTuple):
    """One kernel: the number of its calls in a run, and its own microseconds in a run, without graphs inside it.

    `us` is the median over the runs, `share` its part of all kernels' time. `node` is ONNX Runtime's name, which after
    fusion may not be one of the graph's. `output_bytes` and `output_shapes` (such as ("float32[1, 10]",)) are of the
    last call, if the profiler reports them.
    """

    node: str
    op_type: str
    delegate: str
    calls: float
    us: float
    share: float
    output_bytes: int | None
    output_shapes: tuple[str, ...]


@dataclass(frozen=True)
class Profile:
    """A program's kernels (`rows`), the most expensive first, from `runs` runs on one input.

    `wall_us` is the median time of a whole run in microseconds. Its excess over `total_us` is spent between kernels,
    some of it by the profiler itself. `peak_bytes` is measured: by how many bytes opening the program and its runs
    raised the resident memory of the process at most, with weights, kernels' scratch space and the profiler's own
    notes. In a process that has run programs before it is less, as their memory is used again. None where the system
    does not say (it is Linux that does).

    Example:
        print(runtime.profile(x).table(limit=5))
    """

    program: str
    runs: int
    rows: tuple[Row, ...]
    wall_us: float
    peak_bytes: int | None = None

    @property
    def total_us(self) -> float:
        """The microseconds of a run in kernels."""
        return math.fsum(row.us for row in self.rows)

    def by_operator(self) -> dict[str, float]:
        """The microseconds of a run by operator type, the most expensive first."""
        totals: dict[str, float] = defaultdict(float)
        for row in self.rows:
            totals[row.op_type] += row.us
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def table(self, limit: int | None = 20) -> str:
        """The profile as text, with the `limit` most expensive kernels (None: all)."""
        shown = self.rows[:limit]
        lines = [f"{'us':>9}{'share':>8}{'calls':>7}  {'operator':<22}{'on':<9}{'output':<28}node"]
        for row in shown:
            shapes = ", ".join(row.output_shapes)
            lines.append(
                f"{row.us:>9.1f}{row.share:>8.1%}{row.calls:>7g}  "
                f"{row.op_type:<22}{row.delegate:<9}{shapes:<28}{row.node}".rstrip()
            )
        rest = self.rows[len(shown) :]
        if rest:
            spent, share = math.fsum(row.us for row in rest), math.fsum(row.share for row in rest)
            lines.append(f"{spent:>9.1f}{share:>8.1%}  and {len(rest)} more kernels")
        lines.append(
            f"{self.program}: {self.total_us:.1f} us in kernels, {self.wall_us:.1f} us in all "
            f"(medians, {self.runs} runs)"
        )
        if self.peak_bytes is not None:
            lines.append(f"resident memory rose by {self.peak_bytes / 1e6:.1f} MB at most")
        return "\n".join(lines)


def profile_predict(
    sessions: Sessions,
    name: str,
    make_predictor: Callable[[Sessions], Predictor],
    x: np.ndarray | Mapping[str, np.ndarray],
    runs: int = 20,
) -> Profile:
    """Profile program `name` as a predictor runs it. `make_predictor` makes the predictor from profiled sessions.

    Raises RuntimeInputError.
    """

    def prepare(profiled: Sessions) -> Callable[[], object]:
        predictor = make_predictor(profiled)
        return (lambda: predictor.many(x)) if isinstance(x, Mapping) else (lambda: predictor.one(x))

    return _profile(sessions, name, runs, prepare)


def profile_program(sessions: Sessions, name: str, feed: Mapping[str, np.ndarray], runs: int = 20) -> Profile:
    """Profile program `name` with an array for each of its inputs. Raises RuntimeInputError, RuntimeProgramError."""

    def prepare(profiled: Sessions) -> Callable[[], object]:
        session = profiled.get(name)
        outputs = [value.name for value in session.native.get_outputs()]
        return lambda: session.run(outputs, feed)

    return _profile(sessions, name, runs, prepare)


def profile_graph(path: Path, feed: Mapping[str, np.ndarray], runs: int = 20, threads: int = 1) -> Profile:
    """Profile the graph of any ONNX file on ONNX Runtime's processor kernels, as it optimizes it by itself.

    Arguments:
        path: the file; external data lie beside it. Whoever calls this says that the graph may run here.
        feed: an array for each input.
        runs: passes that are measured, after WARMUP others.
        threads: threads inside one operator.

    Raises RuntimeInputError for runs out of range, RuntimeProgramError for a graph that does not load or run.
    """
    _check_runs(runs)
    ort = onnxruntime()
    with tempfile.TemporaryDirectory(prefix="archipel-profile-") as folder:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.load_model_format", "ONNX")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        try:
            session = open_exact(str(path), options, enable_fallback=0)
            for _ in range(WARMUP + runs):
                session.run(None, dict(feed))
        except error_types() as error:
            raise program_error(path.name, "cannot be measured", error) from None
        events = _read_events(Path(session.end_profiling()), path.name)
    return parse(events, path.name, WARMUP)


def _profile(sessions: Sessions, name: str, runs: int, prepare: Callable[[Sessions], Callable[[], object]]) -> Profile:
    _check_runs(runs)
    onnxruntime()  # the library's own memory does not count
    with tempfile.TemporaryDirectory(prefix="archipel-profile-") as folder:
        resident = ResidentPeak()
        profiled = sessions.profiled(name, Path(folder))
        call = prepare(profiled)
        for _ in range(WARMUP + runs):
            call()
        peak = resident.bytes_since()
        events = _read_events(profiled.end_profile(), name)
    return replace(parse(events, name, WARMUP), peak_bytes=peak)


def _check_runs(runs: int) -> None:
    if not 1 <= runs <= MAX_RUNS:
        raise RuntimeInputError(f"profile: runs must be from 1 to {MAX_RUNS}, got {runs}")


def _read_events(path: Path, name: str) -> bytes:
    if path.stat().st_size > MAX_PROFILE_BYTES:
        raise RuntimeProgramError(
            f"program {name!r}: its profile has more than {MAX_PROFILE_BYTES} bytes; ask for fewer runs"
        )
    return path.read_bytes()


# --- ONNX Runtime's file: Chrome's trace event format -----------------------------------------------------------------


class _Args(msgspec.Struct, frozen=True):
    op_name: str = ""
    provider: str = ""
    output_size: str = ""
    output_type_shape: tuple[dict[str, list[int]], ...] = ()


class _Event(msgspec.Struct, frozen=True):
    cat: str
    name: str
    ts: int = 0
    dur: int = 0
    args: _Args = _Args()


_DECODER = msgspec.json.Decoder(list[_Event])
_HOLDS_GRAPHS = ("If", "Loop", "Scan")
_TYPES = {"float": "float32", "double": "float64"}


def parse(data: bytes, program: str, warmup: int = 0) -> Profile:
    """Read ONNX Runtime's JSON, without its first `warmup` runs. Raises RuntimeProgramError."""
    try:
        events = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RuntimeProgramError(f"program {program!r}: ONNX Runtime's profile cannot be read: {error}") from None
    measured = sorted((event for event in events if event.name == _RUN), key=lambda event: event.ts)[warmup:]
    if not measured:
        raise RuntimeProgramError(f"program {program!r}: ONNX Runtime's profile has no run after {warmup} to warm up")
    starts = [event.ts for event in measured]
    kernels = [
        (index, event)
        for index, event in enumerate(events)
        if event.cat == _NODE and event.name.endswith(_SUFFIX) and event.ts >= starts[0]
    ]
    own = _own_times(kernels)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0] * len(measured))
    calls: dict[tuple[str, str, str], int] = defaultdict(int)
    last: dict[tuple[str, str, str], _Args] = {}
    for index, event in kernels:
        key = (event.name.removesuffix(_SUFFIX), event.args.op_name, event.args.provider)
        # The run that this kernel belongs to: the last one that began before it.
        times[key][bisect_right(starts, event.ts) - 1] += own[index]
        calls[key] += 1
        last[key] = event.args
    # The median, so that one run in which the machine did something else does not matter.
    typical = {key: statistics.median(each) for key, each in times.items()}
    whole = math.fsum(typical.values()) or 1.0
    rows = [
        Row(
            node=node,
            op_type=op_type,
            delegate=name_of(provider),
            calls=calls[key] / len(measured),
            us=typical[key],
            share=typical[key] / whole,
            output_bytes=int(last[key].output_size) if last[key].output_size.isdecimal() else None,
            output_shapes=tuple(_shape(each) for each in last[key].output_type_shape),
        )
        for key in sorted(typical, key=lambda key: -typical[key])
        for node, op_type, provider in [key]
    ]
    return Profile(program, len(measured), tuple(rows), statistics.median(event.dur for event in measured))


def _own_times(kernels: list[tuple[int, _Event]]) -> dict[int, float]:
    # The time of a Loop or an If includes the kernels inside it, which are recorded too, before it. Sorted by start,
    # the longest first, a kernel comes after those around it; `around` is the stack of these.
    own = {index: float(event.dur) for index, event in kernels}
    around: list[tuple[int, _Event]] = []
    for index, event in sorted(kernels, key=lambda item: (item[1].ts, -item[1].dur, -item[0])):
        # Times are rounded down to microseconds: the last kernel inside may seem to end after the Loop around it, but
        # what follows never seems to start before the Loop's end.
        while around and event.ts >= around[-1][1].ts + around[-1][1].dur:
            around.pop()
        if around:
            # Not below 0: the profiler's whole microseconds may add up to more inside than outside.
            own[around[-1][0]] = max(0.0, own[around[-1][0]] - event.dur)
        if event.args.op_name in _HOLDS_GRAPHS:
            around.append((index, event))
    return own


def _shape(typed: Mapping[str, Any]) -> str:
    return ", ".join(f"{_TYPES.get(kind, kind)}{dims}" for kind, dims in typed.items())
