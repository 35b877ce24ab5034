"""Which output of a model the loss reads: the first one, so another one is put there."""

from __future__ import annotations

from archipel.compression.compressed import CompressedModel
from archipel.errors import ConversionError
from archipel.graph import Model


def with_first_output(model: Model, name: str) -> Model:
    """A copy with the output `name` first and the others after it in their order. Raises ConversionError."""
    names = [info.name for info in model.outputs]
    if name not in names:
        raise ConversionError(f"loss_output: the model has no output {name!r}; its outputs are {', '.join(names)}")
    if names[0] == name:
        return model
    result = model.copy()
    forms = [result, result.training_form if isinstance(result, CompressedModel) else None]
    for outputs in (form.ir.graph.outputs for form in forms if form is not None):
        chosen = next(value for value in outputs if value.name == name)
        outputs.remove(chosen)
        outputs.insert(0, chosen)
    return result
