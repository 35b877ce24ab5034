"""PyTorch's exporter computes the same tables for each model, which takes more than half of a small model's export.

`remember` keeps them in this process, as thousands of exports of the tests would compute them anew.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

REGISTRATION = "torch.onnx._internal.exporter._registration"
_TABLES: dict[Any, Any] = {}


def remember() -> None:
    """Once the exporter is imported, its tables of translations and of operators are computed once.

    Does nothing before, and nothing the second time.
    """
    registration = sys.modules.get(REGISTRATION)
    if registration is None or hasattr(registration, "remembered"):
        return
    import torch
    from torch._export import utils

    registry: Any = registration.ONNXRegistry
    read, collect = registry.from_torchlib.__func__, utils._collect_all_valid_cia_ops

    def from_torchlib(cls: Any, *given: Any, **named: Any) -> Any:
        key = "translations", given, tuple(named.items())
        if key not in _TABLES:
            _TABLES[key] = read(cls, *given, **named)
        made = cls()
        made._opset_version = _TABLES[key]._opset_version
        # An export adds the translations that it was given.
        made.functions = {target: list(known) for target, known in _TABLES[key].functions.items()}
        return made

    def collect_all_valid_cia_ops() -> Any:
        key = "operators", len(torch._C._dispatch_get_all_op_names())  # a test may register one
        if key not in _TABLES:
            _TABLES[key] = collect()
        return set(_TABLES[key])

    registry.from_torchlib = classmethod(from_torchlib)
    for module in list(sys.modules.values()):
        if getattr(module, "_collect_all_valid_cia_ops", None) is collect:
            module._collect_all_valid_cia_ops = collect_all_valid_cia_ops  # type: ignore[attr-defined]
    registration.remembered = True  # type: ignore[attr-defined]


def warm_up() -> None:
    """Export a small model, so that this process and its forks have all that the exporter imports and computes once.

    No thread is left behind, and PyTorch's random numbers are where they were.
    """
    import torch
    import tqdm

    from archipel.converter.importers.torch_module import _export, _translations_read_once

    told = tqdm.tqdm.monitor_interval
    tqdm.tqdm.monitor_interval = 0  # its thread would look after bars that hang
    logging.disable(logging.WARNING)  # that torchvision is not here
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        torch.onnx.export(network, (torch.zeros(2, 4),), dynamo=True, verbose=False, dynamic_shapes=shapes)
        remember()
        with _translations_read_once():  # as the product's own exports, which have other settings
            _export(network.eval(), (torch.zeros(2, 4),), shapes, "warm-up")
    logging.disable(logging.NOTSET)
    tqdm.tqdm.monitor_interval = told
