"""Event files of TensorBoard, as tensorboardX and PyTorch write them: curves of scalars, and histograms.

A file is a row of records: the length (8 bytes), its checksum (4), the message, its checksum (4). Format:
github.com/tensorflow/tensorboard, tensorboard/compat/proto/event.proto. Messages and checksum are tensorboardX's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from archipel.errors import InsightError, MissingExtraError
from archipel.insight.limits import MAX_CURVES, MAX_EVENT_BYTES, MAX_HISTOGRAMS, MAX_RECORD_BYTES, MAX_VERSIONS, cut
from archipel.insight.page_data import Histogram, HistogramSeries, TensorStatistics

PATTERN = "*tfevents*"
_MASK = 0xA282EAD8
_CHECKED = 4096
"""Messages of so many bytes or fewer are compared with their checksum; Python takes long for larger ones."""
_MOST_BUCKETS = 10_000
_FLOAT = 1


class EventLog:
    """What is in the event files below a folder.

    Attributes:
        scalars: points (step, value) by (run, tag), in the order of the steps; `run` is the folder below the first.
        histograms: by tag.
        notes: sentences about what could not be read.
    """

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, str], list[tuple[int, float]]] = {}
        self.histograms: dict[str, HistogramSeries] = {}
        self.notes: list[str] = []


def read_events(folder: Path, files: list[Path]) -> EventLog:
    """Read event files.

    Arguments:
        folder: what runs are named relative to.
        files: below it.

    Raises MissingExtraError without tensorboardX, InsightError for files that are too large together. What is broken
    in a file, such as its last record while a training writes on, ends the file and is told in the notes.
    """
    total = sum(path.stat().st_size for path in files)
    if total > MAX_EVENT_BYTES:
        raise InsightError(f"{folder}: {total:,} bytes of event files, more than {MAX_EVENT_BYTES:,}; name one run")
    log = EventLog()
    for path in sorted(files):
        run = path.parent.relative_to(folder).as_posix()
        try:
            for event in _events(path):
                _take(log, "" if run == "." else run, event)
        except InsightError as error:
            log.notes.append(f"{cut(path.name)}: {error}")
    for points in log.scalars.values():
        points.sort(key=lambda point: point[0])
    for series in log.histograms.values():
        series.steps.sort(key=lambda step: step.step)
    return log


def _events(path: Path) -> Iterator[Any]:
    try:
        from tensorboardX.crc32c import crc32c
        from tensorboardX.proto.event_pb2 import Event
    except ModuleNotFoundError:
        raise MissingExtraError("tensorboardX", "insight") from None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    def masked(data: bytes) -> int:
        checksum = int(crc32c(data))
        return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF

    with path.open("rb") as file:
        while head := file.read(12):
            if len(head) < 12:
                raise InsightError("its last record is not complete; what comes before it is shown")
            length, check = struct.unpack("<QI", head)
            if masked(head[:8]) != check:
                raise InsightError("a record has a wrong checksum; what comes before it is shown")
            if length > MAX_RECORD_BYTES:
                raise InsightError(f"a record of {length:,} bytes; what comes before it is shown")
            body = file.read(length + 4)
            if len(body) < length + 4:
                raise InsightError("its last record is not complete; what comes before it is shown")
            message = body[:-4]
            if length <= _CHECKED and masked(message) != struct.unpack("<I", body[-4:])[0]:
                raise InsightError("a record has a wrong checksum; what comes before it is shown")
            try:
                yield Event.FromString(message)
            except DecodeError:
                raise InsightError("a record is no event; what comes before it is shown") from None


def _take(log: EventLog, run: str, event: Any) -> None:
    for value in event.summary.value:
        kind = value.WhichOneof("value")
        if kind == "histo":
            _take_histogram(log, run, event.step, value)
            continue
        number = value.simple_value if kind == "simple_value" else _scalar(value.tensor) if kind == "tensor" else None
        key = cut(run), cut(value.tag)
        if number is not None and (key in log.scalars or len(log.scalars) < MAX_CURVES):
            log.scalars.setdefault(key, []).append((event.step, number))


def _scalar(tensor: Any) -> float | None:
    """The number in a tensor of one, which newer writers make of a scalar."""
    if tensor.dtype != _FLOAT or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    if len(tensor.float_val) == 1:
        return float(tensor.float_val[0])
    return float(struct.unpack("<f", tensor.tensor_content)[0]) if len(tensor.tensor_content) == 4 else None


def _take_histogram(log: EventLog, run: str, step: int, value: Any) -> None:
    found = value.histo
    name = cut(f"{run}: {value.tag}" if run else value.tag)
    if name not in log.histograms and len(log.histograms) >= MAX_HISTOGRAMS:
        return
    series = log.histograms.setdefault(name, HistogramSeries(name=name, kind="logged tensors", steps=[]))
    sums = (found.num, found.sum, found.sum_squares)
    if len(series.steps) >= MAX_VERSIONS or len(found.bucket) > _MOST_BUCKETS or not all(map(math.isfinite, sums)):
        return
    if found.num < 1:
        return
    mean = found.sum / found.num
    deviation = math.sqrt(max(0.0, found.sum_squares / found.num - mean * mean))
    statistics = TensorStatistics(
        count=int(found.num), mean=mean, deviation=deviation, low=found.min, high=found.max,
        counts=_even(list(found.bucket_limit), list(found.bucket), found.min, found.max),
    )  # fmt: skip
    series.steps.append(Histogram(step=step, label=str(step), statistics=statistics))


def _even(limits: list[float], counts: list[float], low: float, high: float, bins: int = 40) -> list[int]:
    """Counts in bins of equal width from those in buckets up to these limits, spread evenly within each bucket."""
    if len(limits) != len(counts) or not math.isfinite(high - low) or high <= low:
        return []
    made, width = [0.0] * bins, (high - low) / bins
    before = low
    for limit, count in zip(limits, counts):
        begin, end = max(low, before), min(high, limit)
        before = max(before, limit)
        if not count or not math.isfinite(count):
            continue
        if end <= begin:
            made[min(bins - 1, max(0, int((begin - low) / width)))] += count
            continue
        first, last = int((begin - low) / width), min(bins - 1, int((end - low) / width))
        for place in range(first, last + 1):
            covered = min(end, low + width * (place + 1)) - max(begin, low + width * place)
            made[place] += count * max(0.0, covered) / (end - begin)
    return [round(each) for each in made]
