"""Every way in which one operator of a network can be divided, all others left whole, beside one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from archipel import Model
from archipel.training.cloud import TorchModule
from archipel.training.cloud.parallel.divided import Divided
from archipel.training.cloud.planner.costs import costs
from archipel.training.cloud.planner.shardings import strategies
from tests.training.cloud.parallel.networks import EXAMPLES, batch


def divisions(folder: str, names: tuple[str, ...] = ("mlp", "cnn")) -> dict[str, float]:
    """The largest difference of loss and gradients, by network, operator and strategy; `folder` has the graphs."""
    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("data", "model"))
    found = {}
    for name in names:
        inputs, labels = batch(name)
        model = Model.from_onnx(Path(folder) / f"{name}.onnx")
        units = costs(model, EXAMPLES).units
        whole = TorchModule(model).train()
        loss = functional.cross_entropy(whole(inputs), labels)
        torch.autograd.backward(loss)
        expected = {path: parameter.grad for path, parameter in whole.named_parameters()}
        first = {unit.name: strategies(unit, mesh.size(1))[0] for unit in units}
        for unit in units:
            for strategy in strategies(unit, mesh.size(1))[1:]:
                module = TorchModule(model).train()
                placed = Divided(module, units, {**first, unit.name: strategy}, mesh, torch.device("cpu"), "tensor")
                error = abs(float(placed.step((inputs,), labels, functional.cross_entropy)) - float(loss))
                for path, parameter in placed.module.named_parameters():
                    wanted = expected[path]
                    if wanted is not None:
                        assert parameter.grad is not None, path
                        gradient = parameter.grad.full_tensor()  # type: ignore[attr-defined]
                        error = max(error, float((gradient - wanted).abs().max()))
                found[f"{name} {unit.op_type} {unit.name} {strategy.name}"] = error
    return found
