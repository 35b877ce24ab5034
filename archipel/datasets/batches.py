"""Batches of a data set: shuffled, shared among processes, made ahead, and resumed at the exact example."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Dataset, Stream
from archipel.datasets.opening import as_dataset
from archipel.datasets.order import Order, count_of, in_pieces, shuffled_pieces
from archipel.datasets.prefetch import WorkerProcesses, run_ahead
from archipel.datasets.taking import take
from archipel.errors import ArchipelError, DatasetError
from archipel.library_errors import one_line

_VERSION = 1
# What must be the same for a state to mean the same place.
_SAME = ("seed", "shuffle", "drop_last", "examples_a_step", "examples", "buffer")


class Batches:
    """The batches of one epoch after the other.

    Each iteration gives the rest of the present epoch and ends. The next one gives the next epoch. The order is a
    function of seed and epoch, so it is the same in every run and in all processes of a job.

    With several processes each step takes `world * batch_size` examples that follow each other in the order; process
    `rank` gets its part of them. So 2 processes with batches of 16 see the same examples in a step as one with 32. The
    rest of an epoch is divided evenly, too; where it does not divide, its first examples come a second time
    (`padding`, fewer than `world`), so that all processes have batches of one size. With `pad=False` sizes differ by
    one, the first processes have more, and the last ones may have a batch without examples: each example counts once.

    Arguments:
        data: anything that `as_dataset` takes.
        batch_size: examples in a batch, in each process.
        shuffle: whether each epoch has an order of its own.
        seed: decides the orders, 0 ... 2**32 - 1.
        rank, world: the number of this process, and how many there are.
        drop_last: leave out the rest that fills no batch in each process.
        pad: repeat examples of the rest, so that every process gets the same number.
        buffer: how many examples of a stream are in memory and shuffled with each other.
        prefetch: how many batches are made ahead, at least as many as workers; 0: none, and no thread.
        workers: threads that make batches. More than one pays where an example is decoded (pictures, compressed
            columns), since decoders run beside each other. A stream has one reader.
        processes: make batches in `workers` processes instead, each with a data set of its own. It pays where Python
            code makes each example, as in many data sets of PyTorch; what is read from arrays only gets slower. They
            end with this object, or with `close`.

    Raises DatasetError for arguments out of range, and while iterating for examples that cannot be read: it names the
    file and the row, or the row's number.

    Example:
        batches = Batches({"input": x, "label": y}, 32, seed=1)
        for epoch in range(batches.epoch, 10):
            for batch in batches:
                train(batch["input"], batch["label"])
                save(weights, batches.state())
    """

    def __init__(
        self,
        data: object,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        pad: bool = True,
        buffer: int = 10_000,
        prefetch: int = 2,
        workers: int = 1,
        processes: bool = False,
    ) -> None:
        self.dataset = as_dataset(data)
        for name, value, least in (
            ("batch_size", batch_size, 1), ("world", world, 1), ("buffer", buffer, 1),
            ("prefetch", prefetch, 0), ("workers", workers, 1), ("rank", rank, 0), ("seed", seed, 0),
        ):  # fmt: skip
            if not isinstance(value, int | np.integer) or value < least:
                raise DatasetError(f"{name} must be a whole number from {least} on, got {value!r}")
        if not 0 <= rank < world:
            raise DatasetError(f"rank must be 0..{world - 1} in a world of {world}, got {rank}")
        if not 0 <= seed < 2**32:
            raise DatasetError(f"seed must be 0..{2**32 - 1}, got {seed}")
        # Whole numbers of NumPy are fine, and go into no state.
        batch_size, seed, rank, world, buffer = map(int, (batch_size, seed, rank, world, buffer))
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self._shuffle, self._seed, self._drop_last, self._pad = shuffle, seed, drop_last, pad
        # As many as there are workers, or some would wait.
        self._buffer, self._prefetch, self._workers = buffer, max(prefetch, workers) if prefetch else 0, workers
        self._step_size = batch_size * world
        self._examples: int | None = None
        if isinstance(self.dataset, Dataset):
            self._examples = len(self.dataset)
            if not self._examples:
                raise DatasetError(f"{getattr(self.dataset, 'name', None) or 'the data set'}: no examples; give data")
            if not self._steps(self._examples):
                raise DatasetError(
                    f"{self._examples} examples fill no batch of {batch_size} in each of {world} processes; "
                    "give more data, a smaller batch, or drop_last=False"
                )
        self._epoch = self._batch = 0
        self._running: object = None
        if processes and (self._examples is None or not prefetch):
            raise DatasetError("processes make batches of a data set ahead: not of a stream, nor with prefetch=0")
        self._with_processes = processes
        self._pool: WorkerProcesses | None = None

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """How many batches of the present epoch were handed out."""
        return self._batch

    @property
    def padding(self) -> int:
        """How many examples come twice in an epoch, over all processes. Raises TypeError for a stream."""
        rest = self._known() % self._step_size
        return 0 if self._drop_last or not self._pad else -rest % self.world

    def __len__(self) -> int:
        """Batches of an epoch in each process. Raises TypeError for a stream, which does not know how many it has."""
        return self._steps(self._known())

    def state(self) -> dict[str, Any]:
        """The place after the last batch that was handed out: plain values for JSON, the same in all processes."""
        place = {"epoch": self._epoch, "batch": self._batch}
        return {"version": _VERSION, **place, **self._settings()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken: the next iteration begins with the batch after it.

        Another number of processes may continue if a step takes as many examples (`world * batch_size`). Ends an
        iteration that is under way. Raises DatasetError for a state of other data or settings.
        """
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            raise DatasetError("not a state of Batches, or of another version; start the epoch again")
        for name, own in self._settings().items():
            if state.get(name) != own:
                raise DatasetError(
                    f"the state was taken with {name} {state.get(name)!r}, now it is {own!r}; "
                    "continue with the same data and settings, or start again"
                )
        epoch, batch = (_whole(state, name) for name in ("epoch", "batch"))
        if self._examples is not None and batch > len(self):
            raise DatasetError(f"a damaged state: batch {batch} of {len(self)} in an epoch")
        self._running = None
        self._epoch, self._batch = epoch, batch

    def seek(self, epoch: int) -> None:
        """Continue at the beginning of an epoch. Ends an iteration that is under way."""
        self.restore({**self.state(), "epoch": epoch, "batch": 0})

    def __iter__(self) -> Iterator[Arrays]:
        mine = self._running = object()
        made = self._made(self.dataset)
        try:
            for batch in made:
                if self._running is not mine:
                    raise DatasetError("another iteration over these batches has begun; use one at a time")
                # Before it is handed out: whoever asks for the state has this batch.
                self._batch += 1
                yield batch
            if self._running is mine:
                self._epoch, self._batch = self._epoch + 1, 0
        finally:
            # Ends the threads now, not when the collector finds the generator.
            made.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """End the worker processes, if there are any. The next iteration starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _made(self, data: Dataset | Stream) -> Iterator[Arrays]:
        if not isinstance(data, Dataset):
            return self._from_stream(data)
        if not self._with_processes:
            return run_ahead((partial(take, data, rows) for rows in self._rows(data)), self._prefetch, self._workers)
        return self._from_processes(data)

    def _from_processes(self, dataset: Dataset) -> Iterator[Arrays]:
        if self._pool is None:
            self._pool = WorkerProcesses(dataset, self._workers)
            weakref.finalize(self, self._pool.close)
        try:
            yield from self._pool.run(self._rows(dataset), self._prefetch)
        except DatasetError:
            self.close()
            raise

    def _rows(self, dataset: Dataset) -> Iterator[NDArray[np.intp]]:
        order, count = Order(dataset, self._shuffle, self._seed), len(dataset)
        for step in range(self._batch, self._steps(count)):
            start = step * self._step_size
            stop = min(start + self._step_size, count)
            first, last, extra = self._share(stop - start)
            rows = order.rows(self._epoch, start, stop)
            if extra:
                rows = np.resize(rows, len(rows) + extra)
            yield rows[first:last]

    def _from_stream(self, stream: Stream) -> Iterator[Arrays]:
        start = self._batch * self._step_size
        pieces = shuffled_pieces(
            stream, self._epoch, start, buffer=self._buffer, shuffle=self._shuffle, seed=self._seed
        )
        steps = in_pieces(pieces, self._step_size)

        def work() -> Iterator[Callable[[], Arrays | None]]:
            ended = False

            def next_step() -> Arrays | None:
                nonlocal ended
                step = None if ended else _next_piece(steps)
                ended = step is None
                return step

            while not ended:
                yield next_step

        ready = run_ahead(work(), self._prefetch, 1)
        try:
            for step in ready:
                # Work ahead of the end gives nothing more.
                if step is None or (self._drop_last and count_of(step) < self._step_size):
                    return
                first, last, extra = self._share(count_of(step))
                rows = np.resize(np.arange(count_of(step)), count_of(step) + extra)[first:last]
                yield {field: np.ascontiguousarray(array[rows]) for field, array in step.items()}
        finally:
            ready.close()  # type: ignore[attr-defined]

    def _share(self, count: int) -> tuple[int, int, int]:
        """This process's part of a step of so many examples: from, to, and how many come twice."""
        extra = -count % self.world if self._pad else 0
        least, more = divmod(count + extra, self.world)
        first = self.rank * least + min(self.rank, more)
        return first, first + least + (self.rank < more), extra

    def _steps(self, examples: int) -> int:
        return examples // self._step_size if self._drop_last else -(-examples // self._step_size)

    def _known(self) -> int:
        if self._examples is None:
            raise TypeError("a stream does not know how many examples it has")
        return self._examples

    def _settings(self) -> dict[str, Any]:
        values = (
            self._seed, self._shuffle, self._drop_last, self._step_size, self._examples,
            self._buffer if self._examples is None else None,
        )  # fmt: skip
        return dict(zip(_SAME, values, strict=True))


def _whole(state: dict[str, Any], name: str) -> int:
    number = state.get(name)
    if type(number) is not int or not 0 <= number < 2**32:
        raise DatasetError(f"a damaged state: {name} is {number!r}, expected a whole number from 0")
    return number


def _next_piece(steps: Iterator[Arrays]) -> Arrays | None:
    try:
        return next(steps, None)
    except (ArchipelError, MemoryError):
        raise
    except Exception as error:
        raise DatasetError(f"the stream: {type(error).__name__}: {one_line(error)}; mend its source") from error
