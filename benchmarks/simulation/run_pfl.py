"""pfl-research's simulation, with evaluation turned off."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from tasks import Prepared, Task, load, parts, serve, torch_accuracy, torch_network


class Network(torch.nn.Module):
    """The network, with what pfl-research asks of one."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(x), len(x))}


class WithoutEvaluation(FederatedAveraging):  # type: ignore[misc]
    def get_next_central_contexts(self, *given: Any, **named: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*given, **named)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(each, do_evaluation=False) for each in contexts)
        return contexts, model, metrics


def prepare(task: Task, rounds: int, folder: Path) -> Prepared:
    # One process, as it runs without a cluster; two threads for the CNN were faster than one.
    torch.set_num_threads(task.workers)
    x, y = map(torch.from_numpy, load(folder))
    devices = [torch.from_numpy(each) for each in parts(len(x), task)]

    def examples(number: int) -> Dataset:
        rows = devices[number][torch.randperm(len(devices[number]))]
        return Dataset((x[rows], y[rows]))

    def run() -> Any:
        network = Network(torch_network(task.name))
        model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
        data = FederatedDataset(examples, get_user_sampler("minimize_reuse", list(range(task.clients))))
        settings = NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=task.cohort, val_cohort_size=0
        )
        training = NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=task.rate, local_batch_size=task.batch, local_max_grad_norm=None
        )
        backend = SimulatedBackend(training_data=data, val_data=data)
        WithoutEvaluation().run(settings, backend, model, training, send_metrics_to_platform=False)
        return network.network

    return run, lambda result: torch_accuracy(result, folder)


if __name__ == "__main__":
    serve(prepare)
