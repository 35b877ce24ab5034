"""Trainings under attack with byzfl's own clients, server and attacks: byzfl_grid.py runs it with the Python that has
byzfl. FOLDER has the data, the first weights and the batches as .npy files, and given.json with the settings; prints
the test accuracy of each training as a JSON list."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byzfl import ByzantineClient, Client, Server
from torch.utils.data import DataLoader, TensorDataset

COMMON: dict[str, Any] = {
    "model_name": "fc_mnist", "device": "cpu", "optimizer_name": "SGD", "milestones": [], "learning_rate_decay": 1.0,
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    given = json.loads((folder / "given.json").read_text())
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y", "test_x", "test_y")}
    batches = np.load(folder / "batches.npy")
    weights = torch.from_numpy(np.load(folder / "first.npy"))
    print(json.dumps([train(run, given, arrays, batches, weights) for run in given["runs"]]))


def train(
    run: dict[str, Any],
    given: dict[str, Any],
    arrays: dict[str, np.ndarray],
    batches: np.ndarray,
    weights: torch.Tensor,
) -> float:
    """The accuracy after the last step. `batches`: rows of each step's examples, `[steps, clients, examples]`."""
    settings = COMMON | {"learning_rate": given["rate"], "weight_decay": given["weight_decay"]}
    tensors = [torch.from_numpy(np.array(arrays[name])) for name in ("test_x", "test_y")]
    test = DataLoader(TensorDataset(*tensors), batch_size=1000)
    server = Server(settings | {"test_loader": test, "aggregator_info": run["rule"], "pre_agg_list": run["mixing"]})
    own = {"loss_name": "NLLLoss", "LabelFlipping": False, "nb_labels": 10, "store_per_client_metrics": False}
    clients = []
    for client in range(batches.shape[1]):
        rows = batches[:, client].reshape(-1)
        examples = TensorDataset(*(torch.from_numpy(np.array(arrays[name][rows])) for name in ("x", "y")))
        loader = DataLoader(examples, batch_size=batches.shape[2])
        clients.append(Client(settings | own | {"momentum": given["momentum"], "training_dataloader": loader}))
    attackers = ByzantineClient({"name": run["attack"], "f": run["attackers"], "parameters": run["parameters"]})
    server.set_parameters(weights)
    for _ in range(len(batches)):
        for client in clients:
            client.set_model_state(server.get_dict_parameters())
            client.compute_gradients()
        honest = [client.get_flat_gradients_with_momentum() for client in clients]
        server.update_model_with_gradients(honest + attackers.apply_attack(honest))
    return float(server.compute_test_accuracy())


if __name__ == "__main__":
    main()
