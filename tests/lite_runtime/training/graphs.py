"""Bundles of programs that tests put together themselves, from real step graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.converter.limits import compute_limits
from archipel.converter.weights import share_weights
from archipel.graph import Model


def write(
    folder: Path,
    programs: Mapping[str, Model],
    key: Ed25519PrivateKey,
    schedule: Sequence[b.Phase] = (),
    repeats: Mapping[str, str] | None = None,
) -> b.Bundle:
    """A bundle of `programs`; `repeats` gives the program that one of several steps repeats."""
    initial = {name: value for program in programs.values() for name, value in program.initial.items()}
    ports = [port for program in programs.values() for port in signature(program).inputs]
    parameters = {
        port.tensor: np.asarray(initial[port.tensor]) for port in ports if isinstance(port, b.roles.Parameter)
    }
    graphs, weights = share_weights(programs, {**parameters, **initial})
    signatures = {
        name: msgspec.structs.replace(signature(program), file=f"{name}.onnx", repeats=(repeats or {}).get(name, ""))
        for name, program in programs.items()
    }
    return b.write_bundle(
        folder,
        name="test",
        programs=signatures,
        graphs={f"{name}.onnx": graph for name, graph in graphs.items()},
        weights=weights,
        parameters=b.parameter_specs(parameters, list(parameters)),
        limits=compute_limits(programs, 8),
        privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=24),
        key=key,
        schedule=tuple(schedule),
    )


def signature(program: Model) -> b.Program:
    assert program.signature is not None
    return program.signature
