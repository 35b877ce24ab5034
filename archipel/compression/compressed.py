"""CompressedModel: a graph that still trains, and the form of it that devices run."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from archipel.bundle.card import mark_compressed
from archipel.compression.deploy import deploy
from archipel.compression.examples import Examples
from archipel.compression.report import Report
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.model_card import card_of, set_card
from archipel.graph.parameters import trainable_names
from archipel.graph.slim import slim


class CompressedModel(Model):
    """A model during and after compression.

    The graph is the simulation: parameters are float, and what compression does to them (masks, rounding) is written
    into the graph, so that it trains. `deployed` is the form that devices run. `training_form` is the float graph that
    devices train, if the simulation has more than that needs (quantization); its parameters have the same names.
    `report` has the measurements of `compress`, and `examples` those that it calibrated and validated with, both on the
    model that it returns and on copies of that.

    Example:
        small, _ = archipel.compress(model, [StaticInt8()], data=data)
        small.save("small.onnx")
        print(small.report.after.nbytes, "bytes", small.trainable_names)
    """

    def __init__(self, model: ir.Model, training_form: Model | None = None) -> None:
        super().__init__(model)
        self.training_form = training_form
        self.report: Report | None = None
        self.examples: Mapping[str, Examples] = {}

    @classmethod
    def of(cls, model: Model) -> CompressedModel:
        """The model itself if it is a CompressedModel, else one made of a copy."""
        return model if isinstance(model, CompressedModel) else cls(model.copy().ir)

    def copy(self) -> CompressedModel:
        """An independent graph; the tensors are shared, and so are `report` and `examples`."""
        result = CompressedModel(self.ir.clone(), None if self.training_form is None else self.training_form.copy())
        result.report, result.examples = self.report, self.examples
        return result

    def deployed(self) -> Model:
        """The form that devices run: weights are computed once and stored small, the graph is optimized."""
        return deploy(self).predict

    @property
    def trainable_names(self) -> tuple[str, ...]:
        """The parameters that training moves: those of the training form, without running statistics."""
        return tuple(trainable_names((self.training_form or self).ir, "*"))

    def with_parameters(self, values: Mapping[str, np.ndarray]) -> CompressedModel:
        """A copy in which tensors have other values, here and in the training form. Raises CompressionError."""
        result = self.copy()
        result.report = None  # it is of the present values
        graphs = [result.ir.graph, *([] if result.training_form is None else [result.training_form.ir.graph])]
        for name, content in values.items():
            holders = [graph.initializers[name] for graph in graphs if name in graph.initializers]
            if not holders:
                raise CompressionError(f"the model has no tensor {name!r}")
            for value in holders:
                before = value.const_value
                if before is None or tuple(before.shape) != content.shape or before.dtype.numpy() != content.dtype:
                    expected = "nothing" if before is None else f"{before.dtype.numpy()}{list(before.shape)}"
                    raise CompressionError(f"{name!r} is {expected}, got {content.dtype}{list(content.shape)}")
                value.const_value = ir.tensor(content, name=name)
        return result

    def save(self, path: str | os.PathLike[str], *, trainable: bool = False) -> None:
        """Write the form that devices run, or with `trainable` the graph with float parameters, as plain ONNX."""
        if trainable:
            super().save(path)
            return
        small = self.deployed().ir
        if (card := card_of(small)) is not None:
            # As training counts them: what devices run has other tensors.
            parameters = (self.training_form or self).parameters
            count = sum(parameters[name].size for name in self.trainable_names)
            set_card(small, mark_compressed(msgspec.structs.replace(card, parameters=count)))
        onnx.save(slim(small, card=True), path)
