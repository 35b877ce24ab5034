"""How far the steps of a training may go: the strategies' bounds, and weights that are as far away or farther."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from archipel import strategies
from archipel.bundle import Limits, Manifest, PrivacyPolicy, Program, TensorSpec
from archipel.bundle.roles import LowRank, Rotation, Update
from archipel.errors import ArchipelError
from archipel.protocol.provenance import check_distance
from archipel.strategies.running_statistics import check_statistics, shared_statistics
from protocol_vectors.inputs import Json

MOST_RATE = 2.0
_RATES: tuple[dict[str, float], ...] = ({}, {"server_lr": 0.25}, {"server_lr": 2.5}, {"server_lr": -1.0})
_BETAS: tuple[dict[str, float], ...] = (
    {"beta1": 0.0}, {"beta1": 0.5, "beta2": 0.1}, {"beta1": 0.3, "beta2": 0.9, "tau": 0.1}, {"beta2": 1.0},
    {"tau": 0.0},
)  # fmt: skip
_OWN: dict[str, tuple[dict[str, float], ...]] = {
    "fedavgm": ({"beta": 0.0}, {"beta": 0.99}, {"beta": 0.995}),
    "fedadam": _BETAS,
    "fedyogi": _BETAS,
    "fedadagrad": _BETAS,
    "fedexp": ({"epsilon": 1e-6}, {"epsilon": 10.0}, {"epsilon": 1e-9}),
    "fedasync": ({"hinge_slope": 2.0, "hinge_delay": 1.0}, {"hinge_slope": -1.0}),
    "feddyn": ({"population": 50.0},),
}


def step_vectors() -> Json:
    return {
        "max_server_lr": MOST_RATE,
        "parameters": [{"name": spec.name, "shape": list(spec.shape)} for spec in _PARAMETERS],
        "updates": {name: [plain_port(port) for port in ports] for name, ports in UPDATES.items()},
        "bounds": list(_bounds()),
        "distances": _distances(),
        "statistics": _statistics(),
    }


def _port(tensor: str, kind: Any, shape: tuple[int, ...], span: float, bits: int, **more: Any) -> Update:
    return Update(
        name=f"{tensor}.update", tensor=tensor, dtype="float32", shape=shape, kind=kind, range=span, bits=bits,
        weighting=more.pop("weighting", "examples"), **more,
    )  # fmt: skip


_SHAPES = {"w": (3, 4), "b": (3,), "m": (2,), "v": (2,)}
_PARAMETERS = tuple(
    TensorSpec(name=name, dtype="float32", shape=shape, sha256="0" * 64) for name, shape in _SHAPES.items()
)
_WEIGHT = _port("weight", "weight", (), 1.0, 16, lowest=1 / 64)
_DELTAS = (_port("w", "delta", (3, 4), 0.5, 12, clip=2.0), _port("b", "delta", (3,), 0.5, 12, clip=2.0))
_ROTATED = Rotation(parameters=("w", "b"), block=16, taken=0)
UPDATES: dict[str, tuple[Update, ...]] = {
    "weighted": (*_DELTAS, _WEIGHT),
    "uniform": tuple(msgspec.structs.replace(port, weighting="uniform") for port in _DELTAS),
    "noisy": (*(msgspec.structs.replace(port, noise=0.01) for port in _DELTAS), _WEIGHT),
    "rotated": (_port("packed", "delta", (16,), 0.5, 4, clip=2.0, carries=_ROTATED), _WEIGHT),
    "factors": (
        _port("w", "delta", (7,), 0.5, 12, clip=2.0, carries=LowRank(parameters=("w",))),
        *_DELTAS[1:],
        _WEIGHT,
    ),
    "unbounded": (*_DELTAS, msgspec.structs.replace(_WEIGHT, lowest=0.0)),
    "tiny_weights": (*_DELTAS, msgspec.structs.replace(_WEIGHT, lowest=1e-5)),
    # A whole number of steps, which rounding may make one less.
    "exact_weights": (*_DELTAS, msgspec.structs.replace(_WEIGHT, lowest=3 / (2**15 - 1))),
    "values": (*_DELTAS, _port("fednova/steps", "value", (), 256.0, 16), _WEIGHT),
    "clipped_values": (
        *_DELTAS,
        _port("c", "value", (3, 4), 0.5, 14, clip=3.0, weighting="uniform"),
        _port("d", "value", (3,), 0.5, 14, clip=3.0, weighting="uniform"),
        _WEIGHT,
    ),
    "squares": (
        *_DELTAS,
        _port("fedexp/square_norm", "value", (), 4.0, 16),
        _port("fedexp/square_norm_rest", "value", (), 0.01, 16),
        _WEIGHT,
    ),
    "models": (*_DELTAS, _port("ifca/weights", "value", (3,), 1.0, 16, clip=1.0), _WEIGHT),
    "rows": (*_DELTAS, _port("feddistill/weights", "value", (3,), 1.0, 16), _WEIGHT),
    "statistics": (
        *_DELTAS,
        _port("m", "mean", (2,), 3.0, 16),
        _port("v", "variance", (2,), 9.0, 16, mean="m"),
        _WEIGHT,
    ),
}
_NEEDED = {
    "fednova": "values", "scaffold": "clipped_values", "fedexp": "squares", "ifca": "models", "feddistill": "rows",
}  # fmt: skip


def plain_port(port: Update) -> Json:
    """With the fields that have their default values, too."""
    fields = {name: getattr(port, name) for name in port.__struct_fields__}
    if port.carries is not None:
        own = {name: getattr(port.carries, name) for name in port.carries.__struct_fields__}
        fields["carries"] = {**own, "method": type(port.carries).__struct_config__.tag}
    return {**fields, "role": "update"}


def make_manifest(strategy: str, updates: str) -> Manifest:
    finish = Program(kind="finish", file="finish.onnx", inputs=(), outputs=UPDATES[updates])
    privacy = PrivacyPolicy(
        modes=("secure",), min_cohort=3, threshold=0.67, max_clip=10.0, max_bits=24, max_server_lr=MOST_RATE
    )
    return Manifest(
        format=1, name="steps", programs={"finish": finish}, parameters=_PARAMETERS,
        limits=Limits(peak_bytes=1, flops_per_example=1, upload_bytes=1), privacy=privacy, files={}, strategy=strategy,
    )  # fmt: skip


def _bounds() -> Iterator[Json]:
    """`bound` is null where it is infinite."""
    for name in sorted(strategies.STRATEGIES):
        made = _NEEDED.get(name, "weighted")
        ways = [made] if name != "fedavg" else [key for key in UPDATES if key not in _NEEDED.values()]
        for updates in ways:
            for given in (*_RATES, *_OWN.get(name, ())):
                for devices in (1, 40):
                    case: Json = {"strategy": name, "updates": updates, "given": given, "devices": devices}
                    manifest = make_manifest(name, updates)
                    try:
                        bound = strategies.get(name).step_bound(manifest, given, devices).parameters
                    except ArchipelError as error:
                        yield {**case, "bound": None, "error": type(error).__name__}
                    else:
                        yield {**case, "bound": bound if math.isfinite(bound) else None, "error": ""}


def _error(work: Any) -> str:
    try:
        work()
    except ArchipelError as error:
        return type(error).__name__
    return ""


def _distances() -> list[Json]:
    """Of the tensor `w`, float32; `moved` is added to each element."""
    start = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    cases = []
    for moved, bound, steps in (
        (0.0, 0.0, 0), (0.25, 0.5, 1), (0.25, 0.4999, 1), (0.25, 0.49999999, 1), (0.25, 0.49999999, 0),
        (-3.0, 6.0, 10), (-3.0, 5.99, 10), (-3.0, 5.99, 10_000),
    ):  # fmt: skip
        after = start + np.float32(moved)
        error = _error(lambda: check_distance("w", {"w": after}, {"w": start}, bound, steps))  # noqa: B023
        cases.append({"start": start.tolist(), "moved": moved, "bound": bound, "steps": steps, "error": error})
    return cases


def _statistics() -> list[Json]:
    """Of the pair `m` and `v`, float32 [2]."""
    pairs = shared_statistics(make_manifest("fedavg", "statistics"))
    start: Mapping[str, list[float]] = {"m": [0.0, 2.0], "v": [1.0, 0.0]}
    cases = []
    for after, back, on in (
        ({"m": [0.0, 2.0], "v": [1.0, 0.0]}, 0, 0),
        ({"m": [3.0, 2.0], "v": [10.0, 0.0]}, 0, 1),
        ({"m": [3.01, 2.0], "v": [1.0, 0.0]}, 0, 1),
        ({"m": [0.0, 2.02], "v": [1.0, 0.0]}, 0, 1),
        ({"m": [0.0, 2.0], "v": [10.02, 0.0]}, 0, 1),
        ({"m": [0.0, 2.0], "v": [0.0999, 0.0]}, 0, 1),
        ({"m": [0.0, 2.0], "v": [0.0999, 0.0]}, 1, 0),
        ({"m": [0.0, 2.0], "v": [0.0985, 0.0]}, 0, 1),
        ({"m": [9.4, 2.0], "v": [1.0, 0.0]}, 1, 0),
        ({"m": [9.6, 2.0], "v": [1.0, 0.0]}, 1, 0),
        ({"m": [12.0, 2.0], "v": [99.0, 0.0]}, 0, 2),
        ({"m": [13.0, 2.0], "v": [99.0, 0.0]}, 0, 2),
        ({"m": [13.0, 2.0], "v": [99.0, 0.0]}, 1, 1),
        ({"m": [0.0, 2.0], "v": [1.0, -1e-6]}, 0, 5),
        ({"m": [1e30, -1e30], "v": [1e30, 1e-30]}, 800, 800),
    ):
        first, second = ({name: np.array(rows, np.float32) for name, rows in each.items()} for each in (after, start))
        error = _error(lambda: check_statistics("m", first, second, pairs, back, on))  # noqa: B023
        cases.append({"start": start, "after": after, "back": back, "on": on, "error": error})
    return cases
