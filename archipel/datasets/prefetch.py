"""Does work ahead in threads, in order: what is asked for is ready, and an error arrives where its result would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="archipel-batches")
    try:
        for each in work:
            waiting.append(pool.submit(each))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
