"""Bundles from graphs in ONNX's text form, with short forms of their roles."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from onnx import parser

from archipel import bundle as b
from archipel.bundle import roles
from archipel.lite_runtime import Runtime

ONNX_NAMES: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.BOOL: "bool",
}
Role = tuple[Callable[..., roles.Port], dict[str, Any]]
Programs = Mapping[str, tuple[str, str, Mapping[str, Role]]]
"""By name: kind, graph in ONNX's text form, and what each of its inputs and outputs is."""
Make = Callable[..., Runtime]
"""As a BundleMaker, and load the result."""


class Roles:
    """Short forms: what a test says about a graph's input or output beside its name, dtype and shape."""

    example: Role = (roles.Example, {})
    label: Role = (roles.Label, {})
    weight: Role = (roles.ExampleWeight, {})
    step: Role = (roles.Step, {})
    seed: Role = (roles.Seed, {})
    output: Role = (roles.Output, {})

    @staticmethod
    def prediction(output: str) -> Role:
        return roles.Prediction, {"output": output}

    @staticmethod
    def parameter(tensor: str) -> Role:
        return roles.Parameter, {"tensor": tensor}

    @staticmethod
    def start(tensor: str) -> Role:
        return roles.Start, {"tensor": tensor}

    @staticmethod
    def personal(tensor: str, init: str | None = None) -> Role:
        return roles.Personal, {"tensor": tensor, "init": init}

    @staticmethod
    def state(tensor: str, lifetime: str, init: float | str = 0.0) -> Role:
        return roles.State, {"tensor": tensor, "lifetime": lifetime, "init": init}

    @staticmethod
    def broadcast(tensor: str) -> Role:
        return roles.Broadcast, {"tensor": tensor}

    @staticmethod
    def hyper(default: float, minimum: float = 0.0, maximum: float = 10.0) -> Role:
        return roles.Hyperparameter, {"default": default, "minimum": minimum, "maximum": maximum}

    @staticmethod
    def count(of: str) -> Role:
        return roles.Count, {"of": of}

    @staticmethod
    def noise(distribution: str, scale: float) -> Role:
        return roles.Noise, {"distribution": distribution, "scale": scale}

    @staticmethod
    def derived(tensor: str) -> Role:
        return roles.Derived, {"tensor": tensor}

    @staticmethod
    def update(tensor: str, kind: str = "delta") -> Role:
        return roles.Update, {
            "tensor": tensor, "kind": kind, "weighting": "examples", "range": 100.0, "bits": 24, "clip": 10.0,
        }  # fmt: skip

    @staticmethod
    def metric(reduction: str = "mean") -> Role:
        return roles.Metric, {"reduction": reduction}


class BundleMaker:
    """Writes signed bundles below a folder; called, it returns the folder of another one."""

    def __init__(self, folder: Path, key: Ed25519PrivateKey) -> None:
        self.key = key
        self._folder = folder
        self._number = itertools.count()

    def __call__(
        self,
        programs: Programs,
        parameters: Mapping[str, np.ndarray],
        tensors: Mapping[str, np.ndarray] | None = None,
        schedule: Sequence[b.Phase] = (),
        peak_bytes: int = 1000,
        steps: int = 1,
    ) -> Path:
        values = {**parameters, **(tensors or {})}
        weights = b.write_weights(values)
        layout = b.weights_layout(weights, len(weights))
        graphs, signatures = {}, {}
        for name, (kind, text, meaning) in programs.items():
            model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
            _share(model, layout)
            onnx.checker.check_model(_inlined(model))
            graphs[f"{name}.onnx"] = model.SerializeToString()
            signatures[name] = b.Program(
                kind=kind,  # type: ignore[arg-type]
                file=f"{name}.onnx",
                inputs=tuple(_port(value, meaning) for value in model.graph.input),
                outputs=tuple(_port(value, meaning) for value in model.graph.output),
                steps=steps if kind == "train" else 1,
            )
        folder = self._folder / f"bundle-{next(self._number)}"
        b.write_bundle(
            folder,
            name="test",
            programs=signatures,
            graphs=graphs,
            weights=weights,
            parameters=b.parameter_specs(values, list(parameters)),
            limits=b.Limits(peak_bytes=peak_bytes, flops_per_example=1, upload_bytes=1),
            privacy=b.PrivacyPolicy(modes=("secure",), min_cohort=2, threshold=0.6, max_clip=10.0, max_bits=24),
            key=self.key,
            schedule=tuple(schedule),
        )
        return folder

    def load(self, *args: Any, **kwargs: Any) -> Runtime:
        """Make one, and load it."""
        folder = self(*args, **kwargs)
        return Runtime(b.open_bundle(folder, [self.key.public_key().public_bytes_raw()]))


def _port(value: onnx.ValueInfoProto, meaning: Mapping[str, Role]) -> Any:
    kind, more = meaning[value.name]
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return kind(name=value.name, dtype=ONNX_NAMES[tensor.elem_type], shape=shape, **more)


def _share(model: onnx.ModelProto, layout: Mapping[str, b.TensorPlace]) -> None:
    # Initializers that weights.safetensors has too become external data, as in every converted bundle.
    for tensor in model.graph.initializer:
        place = layout.get(tensor.name)
        if place is None:
            continue
        name, dims, dtype = tensor.name, list(tensor.dims), tensor.data_type
        tensor.Clear()
        tensor.name, tensor.data_type, tensor.data_location = name, dtype, onnx.TensorProto.EXTERNAL
        tensor.dims.extend(dims)
        pairs = {"location": b.WEIGHTS_FILE, "offset": str(place.offset), "length": str(place.nbytes)}
        for key, value in pairs.items():
            tensor.external_data.add(key=key, value=value)


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            size = int(np.prod(tensor.dims)) * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.raw_data = b"\0" * size
    return copy
