"""Workers of a simulation: each keeps its sessions, and answers a round with one running sum.

A worker gets a round's tensors once and then the numbers of clients, a few at a time, the longest first, whoever is
idle next; so slow clients do not hold up the others. Sums of whole numbers are the same in any order, so each worker
hands one over at the end. Sums of floating point come back for each part, and are put together in the order of the
clients, whoever computed which. Where the workers are is their crew's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from archipel.errors import SimulationError
from archipel.simulation.clients import Clients
from archipel.simulation.crews.worker import HAND_OVER, Crew, WorkerLost
from archipel.simulation.lanes import MOST_LANES
from archipel.simulation.work import Partial, Work

_PARTS = 4
"""A worker gets about so many parts of a round, so that none waits long for the slowest."""
_PLAIN_PART = 8
"""Clients of a part of a plain round, whatever the number of workers: floating point depends on what is added first."""
_ATTEMPTS = 3
"""A part with which so many workers are lost is what ends them."""


class Workers:
    """An engine whose clients run in the workers of a crew, which it ends.

    Arguments:
        crew: started.
        clients: as of OneByOne.
        client_axis: whether workers run their clients at once (Lanes).
    """

    def __init__(self, crew: Crew, clients: Clients, *, client_axis: bool) -> None:
        self._crew, self._clients, self._axis = crew, clients, client_axis
        self._idle = list(range(crew.count))
        self._starting: set[int] = set()
        self._lost: Counter[int] = Counter()
        """By part, in this round."""
        self._idle_losses = 0

    def run(self, work: Work, clients: Sequence[int]) -> Partial:
        """The sum of these devices' updates. Raises SimulationError, also where workers end."""
        sizes = {client: self._clients.count(client) for client in clients}
        parts = self._divide(work, clients, sizes)
        waiting = sorted(range(len(parts)), key=lambda index: sum(sizes[client] for client in parts[index]))
        total, done = Partial(work.empty_sum()), dict[int, Partial]()
        self._lost.clear()
        self._crew.announce(work)
        while waiting:
            held = self._hand_out(parts, waiting, done)
            for worker in held:
                self._crew.send(worker, HAND_OVER)
            for worker, indices in held.items():
                try:
                    total.merge(self._crew.receive(worker, "the end of a round"))
                except WorkerLost as error:
                    self._idle.remove(worker)
                    self._give_back(worker, indices, parts, waiting, error)
        for index in sorted(done):
            total.merge(done[index])
        place = {client: index for index, client in enumerate(clients)}
        total.reports.sort(key=lambda report: place[report.client])
        return total

    def close(self) -> None:
        self._crew.close()

    def _hand_out(self, parts: list[list[int]], waiting: list[int], done: dict[int, Partial]) -> dict[int, list[int]]:
        """Have the parts computed whose numbers wait, the last first. Sums that come back go into `done`.

        Returns which parts are in the sum that a worker holds.
        """
        held: dict[int, list[int]] = {}
        running: dict[int, int] = {}
        while waiting or running:
            while self._idle and waiting:
                worker, index = self._idle.pop(), waiting.pop()
                self._crew.send(worker, parts[index])
                running[worker] = index
            for worker in self._crew.wait({*running, *self._starting}):
                part = running.pop(worker, None)
                what = "start" if part is None else f"clients {parts[part][0]} to {parts[part][-1]}"
                try:
                    answer = self._crew.receive(worker, what)
                except WorkerLost as error:
                    mine = [*held.pop(worker, []), *([] if part is None else [part])]
                    self._starting.discard(worker)
                    self._give_back(worker, mine, parts, waiting, error)
                    continue
                self._idle.append(worker)
                if part is None:
                    self._starting.discard(worker)
                elif answer is None:
                    held.setdefault(worker, []).append(part)
                else:
                    done[part] = answer
        return held

    def _give_back(
        self, worker: int, indices: list[int], parts: list[list[int]], waiting: list[int], error: WorkerLost
    ) -> None:
        """What a lost worker had to do waits for another one, and there is a new one in its place."""
        for index in indices:
            self._lost[index] += 1
            if self._lost[index] == _ATTEMPTS:
                raise SimulationError(
                    f"clients {parts[index][0]} to {parts[index][-1]}: {_ATTEMPTS} workers were lost with them, the "
                    f"last: {error}; try fewer workers, or a smaller cohort"
                )
        if not indices:
            self._idle_losses += 1
            if self._idle_losses == _ATTEMPTS * self._crew.count:
                raise SimulationError(f"worker {worker} ends before it has done anything, again and again: {error}")
        waiting.extend(indices)
        self._crew.replace(worker)
        self._starting.add(worker)

    def _divide(self, work: Work, clients: Sequence[int], sizes: dict[int, int]) -> list[list[int]]:
        if not work.exact:
            size = _PLAIN_PART
        else:
            clients = sorted(clients, key=lambda client: -sizes[client])
            size = max(1, -(-len(clients) // (self._crew.count * (1 if self._axis else _PARTS))))
            size = min(size, MOST_LANES) if self._axis else size
        return [list(clients[first : first + size]) for first in range(0, len(clients), size)]
