"""The same problem in DeepXDE on PyTorch, in an environment of its own: `python peer.py FOLDER PROBLEM STEPS`.

FOLDER/given.npz has points, values and the network's first weights; FOLDER/peer.npz gets the solution on the grid, the
losses and the processor's seconds. This file imports nothing of archipel: `pip install torch==2.13.0 deepxde`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["DDE_BACKEND"] = "pytorch"

import deepxde as dde
import numpy as np
import torch

DIFFUSIVITY, VISCOSITY = 0.4, 0.01 / np.pi


def heat(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return dde.grad.jacobian(u, x, i=0, j=1) - DIFFUSIVITY * dde.grad.hessian(u, x, i=0, j=0)


def burgers(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    u_x, u_t = dde.grad.jacobian(u, x, i=0, j=0), dde.grad.jacobian(u, x, i=0, j=1)
    return u_t + u * u_x - VISCOSITY * dde.grad.hessian(u, x, i=0, j=0)


def main() -> None:
    folder, name, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    given = np.load(folder / "given.npz")
    low = -1.0 if name == "burgers" else 0.0
    domain = dde.geometry.GeometryXTime(dde.geometry.Interval(low, 1), dde.geometry.TimeDomain(0, 1))
    edge = dde.icbc.PointSetBC(given["edge"], given["values"])
    equation = heat if name == "heat" else burgers
    data = dde.data.TimePDE(domain, equation, [edge], num_domain=0, anchors=given["interior"])
    layers = sum(key.startswith("w") for key in given.files)
    widths = [given["w0"].shape[0], *(given[f"w{i}"].shape[1] for i in range(layers))]
    net = dde.nn.FNN(widths, "tanh", "Glorot normal")
    with torch.no_grad():
        for i, linear in enumerate(net.linears):
            linear.weight.copy_(torch.from_numpy(given[f"w{i}"].T))
            linear.bias.copy_(torch.from_numpy(given[f"b{i}"]))
    model = dde.Model(data, net)
    model.compile("adam", lr=1e-3)
    model.train(iterations=1, display_every=1, verbose=0)  # builds what the first step builds
    with torch.no_grad():
        for i, linear in enumerate(net.linears):
            linear.weight.copy_(torch.from_numpy(given[f"w{i}"].T))
            linear.bias.copy_(torch.from_numpy(given[f"b{i}"]))
    model.compile("adam", lr=1e-3)
    begin = time.process_time()
    history, _ = model.train(iterations=steps, display_every=max(steps, 1), verbose=0)
    seconds = time.process_time() - begin
    losses = np.sum(history.loss_train, axis=1)
    np.savez(folder / "peer.npz", u=model.predict(given["grid"]), losses=losses, seconds=seconds)


if __name__ == "__main__":
    main()
