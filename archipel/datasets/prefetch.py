"""Does work ahead, in order: what is asked for is ready, and an error arrives where its result would."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from archipel.datasets.dataset import Arrays, Dataset
from archipel.datasets.taking import take
from archipel.errors import DatasetError
from archipel.library_errors import one_line

Result = TypeVar("Result")


def run_ahead(work: Iterator[Callable[[], Result]], depth: int, workers: int) -> Iterator[Result]:
    """The results of all work, in its order.

    Arguments:
        work: functions without arguments. With one worker they run one after the other, in order.
        depth: how many results are made before they are asked for; 0 runs all in the caller's thread.
        workers: how many threads make them.

    An error of a function is raised where its result would come. Leaving the iteration ends the threads.
    """
    if not depth:
        for each in work:
            yield each()
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="archipel-batches")
    try:
        yield from in_order((pool.submit(each) for each in work), depth)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(futures: Iterator[Future[Result]], depth: int) -> Iterator[Result]:
    """The results of futures in their order, of which `depth` are begun before they are asked for."""
    waiting: deque[Future[Result]] = deque()
    try:
        for each in futures:
            waiting.append(each)
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for each in waiting:
            each.cancel()


class WorkerProcesses:
    """Processes that have a data set of their own and take examples from it.

    They are started anew, not forked: a fork of a process with threads (PyTorch's, Arrow's) may stop for ever. So a
    program that uses them must be a file, with `if __name__ == "__main__":` around what it does.

    Raises DatasetError for a data set that cannot be pickled.
    """

    def __init__(self, dataset: Dataset, workers: int) -> None:
        try:
            pickled = pickle.dumps(dataset)
        except Exception as error:
            raise DatasetError(
                f"{type(dataset).__name__} cannot be sent to worker processes ({type(error).__name__}: "
                f"{one_line(error)}); define its classes in a module, or use threads"
            ) from error
        self._pool = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_receive, initargs=(pickled,)
        )

    def run(self, work: Iterator[NDArray[np.intp]], depth: int) -> Iterator[Arrays]:
        """The examples of these numbers, in order, made ahead. Raises DatasetError where a worker dies."""
        try:
            yield from in_order((self._pool.submit(_take, rows) for rows in work), depth)
        except BrokenProcessPool:
            raise DatasetError(
                "a worker process that makes batches died: killed (too little memory?), or its program has no "
                'if __name__ == "__main__": around what it does; use fewer workers, or threads'
            ) from None

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=True, cancel_futures=True)


_held: Dataset | None = None


def _receive(pickled: bytes) -> None:
    global _held
    _held = pickle.loads(pickled)


def _take(rows: NDArray[np.intp]) -> Arrays:
    assert _held is not None
    return take(_held, rows)
