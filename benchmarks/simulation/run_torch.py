"""A loop in PyTorch: logistic regression in one process, the CNN in two, which divide each round's clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tasks import Prepared, Task, cohorts, load, parts, serve, torch_accuracy, torch_network

State = dict[str, torch.Tensor]


def prepare(task: Task, rounds: int, folder: Path) -> Prepared:
    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, load(folder))
    devices = [torch.from_numpy(each) for each in parts(len(x), task)]
    drawn = cohorts(task, rounds)
    network = torch_network(task.name)

    def train(network: Any, start: State, number: int, total: State) -> int:
        """One client's epoch; its parameters, times its examples, go into `total`."""
        parameters = dict(network.named_parameters())
        with torch.no_grad():
            torch._foreach_copy_(list(parameters.values()), list(start.values()))
        optimizer = torch.optim.SGD(network.parameters(), lr=task.rate, foreach=True)
        rows = devices[number]
        for chosen in rows[torch.randperm(len(rows))].split(task.batch):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            torch._foreach_add_(list(total.values()), list(parameters.values()), alpha=len(rows))
        return len(rows)

    def empty(start: State) -> State:
        return {name: torch.zeros_like(value) for name, value in start.items()}

    def alone() -> Any:
        start = {name: value.detach().clone() for name, value in network.named_parameters()}
        for cohort in drawn:
            total = empty(start)
            count = sum(train(network, start, int(number), total) for number in cohort)
            start = {name: value / count for name, value in total.items()}
        return filled(start)

    def in_processes() -> Any:
        import torch.multiprocessing as processes

        context = processes.get_context("fork")
        start = {name: value.detach().clone().share_memory_() for name, value in network.named_parameters()}
        totals = [
            {name: torch.zeros_like(value).share_memory_() for name, value in start.items()}
            for _ in range(task.workers)
        ]
        clients, answers = context.SimpleQueue(), [context.SimpleQueue() for _ in range(task.workers)]
        ready = context.Barrier(task.workers + 1)

        def work(worker: int) -> None:
            torch.set_num_threads(1)
            own = torch_network(task.name)
            for _ in range(rounds):
                ready.wait()
                torch._foreach_zero_(list(totals[worker].values()))
                count = 0
                while (number := clients.get()) >= 0:
                    count += train(own, start, number, totals[worker])
                answers[worker].put(count)

        workers = [context.Process(target=work, args=(worker,)) for worker in range(task.workers)]
        for worker in workers:
            worker.start()
        for cohort in drawn:
            for number in [*map(int, cohort), *[-1] * task.workers]:
                clients.put(number)
            ready.wait()
            count = sum(answer.get() for answer in answers)
            for name, value in start.items():
                torch.div(sum(total[name] for total in totals), count, out=value)
        for worker in workers:
            worker.join()
        return filled(start)

    def filled(values: State) -> Any:
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                parameter.copy_(values[name])
        return network

    return (alone if task.workers == 1 else in_processes), lambda result: torch_accuracy(result, folder)


if __name__ == "__main__":
    np.random.seed(0)
    serve(prepare)
