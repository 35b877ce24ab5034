"""What a conversion decided on its own, in sentences for people. `predict` keeps them in its metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping

from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.bundle.roles import Parameter, Personal, Update
from archipel.converter.options import Training
from archipel.graph import Model
from archipel.graph.parameters import statistics
from archipel.training.folding import is_batch_norm


def conversion_notes(model: Model, training: Training | None, programs: Mapping[str, Model]) -> list[str]:
    """What `programs` do that nobody has said in the arguments; `model` is the source before compression."""
    notes = _batch_norm(model, training, programs)
    if training is None:
        return notes
    outputs = [info.name for info in model.outputs]
    if len(outputs) > 1:
        why = "; loss_output= chooses another" if training.loss_output is None else ", as loss_output= asks"
        notes.append(f"the loss reads the output {outputs[0]!r}, the first of {len(outputs)}{why}")
    notes.append(_trained(model, programs))
    if training.step_options.get("kernels"):
        notes.append(_kernels(programs))
    if "features" in programs:
        notes.append("no training changes the layers before those: a device runs them once for each example (features)")
    return notes


def _batch_norm(model: Model, training: Training | None, programs: Mapping[str, Model]) -> list[str]:
    layers = sum(map(is_batch_norm, model.ir.graph.all_nodes()))
    if not layers:
        return []
    left = sum(map(is_batch_norm, programs["predict"].ir.graph.all_nodes()))
    notes = [f"BatchNormalization: {layers - left} of {layers} are computed into the layers before them in predict"]
    mode = None if training is None else training.step_options.get("batch_norm", "train")
    if mode == "train":
        kinds = {port.kind for program in programs.values() if program.kind == "finish"
                 for port in program.program.outputs if isinstance(port, Update)}  # fmt: skip
        where = "are averaged over the devices" if "variance" in kinds else "stay on each device"
        notes.append(f"BatchNormalization: a step normalizes with its batch; running mean and variance {where}")
    elif mode == "frozen":
        notes.append("BatchNormalization: training normalizes with the model's running mean and variance, which stay")
    elif mode == "folded":
        notes.append("BatchNormalization: folded before training too, so no step changes it")
    return notes


def _kernels(programs: Mapping[str, Model]) -> str:
    trained = [program.ir.graph for program in programs.values() if program.kind == "train"]
    called = max(sum(node.domain == KERNELS_DOMAIN for node in graph.all_nodes()) for graph in trained)
    if called:
        return f"the kernel pack has operators for {called} nodes of a step; devices without it run their bodies"
    return "the kernel pack has no operator for this model's training: kernels changes nothing"


def _trained(model: Model, programs: Mapping[str, Model]) -> str:
    averages = set(statistics(model.ir))
    moved = {port.tensor: math.prod(int(size) for size in port.shape) for program in programs.values()
             if program.kind == "train" for port in program.program.outputs
             if isinstance(port, Parameter | Personal) and port.tensor not in averages}  # fmt: skip
    there = {name: array.size for name, array in model.parameters.items() if name not in averages}
    own = {name: size for name, size in moved.items() if name in there}
    if len(own) < len(moved):
        new = {name: size for name, size in moved.items() if name not in there}
        text = f"devices train {len(new)} new tensors ({sum(new.values()):,} numbers)"
        return f"{text} and {len(own)} of the model's {len(there)} ({sum(own.values()):,} of {sum(there.values()):,})"
    return (
        f"devices train {len(own)} of the model's {len(there)} tensors ({sum(own.values()):,} of "
        f"{sum(there.values()):,} numbers)"
    )
