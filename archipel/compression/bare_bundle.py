"""A model in a bundle of its own, signed by a key that nobody keeps: the runtime opens nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from archipel.bundle import (
    Limits,
    PrivacyPolicy,
    Program,
    generate_key,
    write_bundle,
    write_weights,
)
from archipel.bundle.roles import DType, Example, Output
from archipel.graph import Model
from archipel.graph.model import TensorInfo
from archipel.graph.slim import slim


def write_bare_bundle(model: Model, folder: Path, name: str) -> bytes:
    """Write a bundle that predicts with the graph as it is, to be used on this machine and at once.

    Returns the public key with which it opens. Raises BundleError for a graph that the runtime refuses.
    """
    key = generate_key()
    predict = Program(
        kind="predict",
        file="predict.onnx",
        inputs=tuple(Example(name=i.name, dtype=cast(DType, i.dtype), shape=_shape(i)) for i in model.inputs),
        outputs=tuple(Output(name=o.name, dtype=cast(DType, o.dtype), shape=_shape(o)) for o in model.outputs),
    )
    write_bundle(
        folder,
        name=name,
        programs={"predict": predict},
        graphs={"predict.onnx": slim(model.ir).SerializeToString()},
        weights=write_weights({}),
        parameters=(),
        limits=Limits(peak_bytes=1, flops_per_example=1, upload_bytes=0),
        privacy=PrivacyPolicy(modes=("secure",), min_cohort=3, threshold=0.67, max_clip=1.0, max_bits=16),
        key=key,
    )
    return key.public_key().public_bytes_raw()


def _shape(info: TensorInfo) -> tuple[int | str, ...]:
    # Unnamed sizes are not the same size.
    return tuple(f"{info.name}_{axis}" if dim == "?" else dim for axis, dim in enumerate(info.shape))
