"""What a training minimizes: one loss, one for each output, or a function of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from archipel.datasets.entry_names import LABELS
from archipel.errors import TrainingError
from archipel.graph.model import Model
from archipel.library_errors import one_line
from archipel.training.arguments import number
from archipel.training.by_name import LOSSES, make_loss
from archipel.training.cloud.config import TrainConfig
from archipel.training.cloud.device import is_out_of_memory
from archipel.training.cloud.objective.graph_loss import GraphLoss

if TYPE_CHECKING:
    import torch

Outputs = Any
"""What a module returns: a tensor, a tuple of tensors or a mapping of tensors."""

Batch = Mapping[str, "torch.Tensor"]
OwnLoss = Callable[[Outputs, Batch], "torch.Tensor"]
LABEL = "label"


@dataclass(frozen=True)
class Term:
    """One summand of the objective.

    output  the output's name; None for the first one
    label   the field that it is compared with
    weight  what its loss is multiplied with in the sum
    """

    output: str | None
    label: str
    weight: float
    loss: GraphLoss

    def named(self, metric: str) -> str:
        """The metric's name: `metric`, or `output.metric` where there are several outputs."""
        return metric if self.output is None else f"{self.output}.{metric}"


class Objective:
    """The losses of a training.

    Arguments:
        config: its `loss`, `label` and `next_token`.
        fields: the names of the data's fields.
        outputs: the names of the model's outputs, where they are known.

    Attributes:
        terms: one for each output that has a loss; none where the loss is a function.
        labels: the fields that are labels.

    Raises TrainingError for what is no loss, or a label that is no field.
    """

    def __init__(self, config: TrainConfig, fields: Sequence[str], outputs: Sequence[str] = ()) -> None:
        self.own: OwnLoss | None = None
        self.terms: tuple[Term, ...] = ()
        self._outputs = tuple(outputs)
        loss = config.loss
        # One of training.losses that nobody called is a function, too; `make_loss` refuses it.
        if callable(loss) and not isinstance(loss, type) and loss not in LOSSES.values():
            self.own = loss
            named = config.label if config.label is not None else LABEL
            self.labels: tuple[str, ...] = (named,) if named in fields else ()
            return
        if isinstance(loss, Mapping) and not isinstance(loss.get("name"), str):
            self.terms = tuple(_term(str(name), value, fields) for name, value in loss.items())
            if not self.terms:
                raise TrainingError("loss: an empty table; name a loss for at least one output")
        else:
            self.terms = (_single(config, loss, fields),)
        self.labels = tuple(dict.fromkeys(term.label for term in self.terms))

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | int]:
        """The scalar to minimize, and how much the batch counts in a mean over several."""
        if self.own is not None:
            return self._own(outputs, batch), len(next(iter(batch.values())))
        pairs = [
            (term.weight, *term.loss.mean(self._pick(outputs, term), self._label(outputs, batch, term)))
            for term in self.terms
        ]
        if len(pairs) == 1 and pairs[0][0] == 1.0:
            return pairs[0][1], pairs[0][2]
        # Several means have no common weight but the number of examples.
        return sum_of([weight * value for weight, value, _ in pairs]), len(next(iter(batch.values())))

    def total(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        """The sum of the labels' weighted losses, of an objective with one term."""
        (term,) = self.terms
        return term.loss.sums(self._pick(outputs, term), self._label(outputs, batch, term)).total * term.weight

    def label_weight(self, batch: Batch) -> torch.Tensor | None:
        """The sum of the labels' weights, a float64 scalar; None where every label counts the same."""
        if len(self.terms) != 1 or self.terms[0].label not in batch:
            return None
        return self.terms[0].loss.label_weight(batch[self.terms[0].label])

    def check(self, model: Model) -> None:
        """Refuse losses that do not fit the graph's outputs, such as one that applies a softmax a second time."""
        values = {str(value.name): value for value in model.ir.graph.outputs}
        for term in self.terms:
            if term.output is not None and term.output not in values:
                raise TrainingError(f"loss: the model has no output {term.output!r}; it has {', '.join(values)}")
            term.loss.loss.label(values[term.output] if term.output is not None else model.ir.graph.outputs[0])

    def output(self, outputs: Outputs, term: Term) -> torch.Tensor:
        """The output that a term is about, in float32 or float64."""
        return self._pick(outputs, term)

    def label(self, outputs: Outputs, batch: Batch, term: Term) -> torch.Tensor:
        """The label of a term in the type that its loss needs."""
        return self._label(outputs, batch, term)

    def _own(self, outputs: Outputs, batch: Batch) -> torch.Tensor:
        import torch

        assert self.own is not None
        try:
            value = self.own(outputs, batch)
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            # The model has computed its outputs; what follows would blame it.
            told = f"{type(error).__name__}: {one_line(error)}"
            fields = ", ".join(map(repr, batch))
            raise TrainingError(
                f"loss: the function, called with the outputs and the batch (a mapping of {fields}), raised {told}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.ndim:
            got = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise TrainingError(f"loss: the function must return a scalar tensor, returned {got}; take its mean")
        return value

    def _pick(self, outputs: Outputs, term: Term) -> torch.Tensor:
        import torch

        chosen = self._find(outputs, term.output)
        if not isinstance(chosen, torch.Tensor):
            raise TrainingError(f"the model returns {type(chosen).__name__}, expected tensors; give a loss function")
        # A loss of 16 bits would lose small differences: sums over many classes are made in 32.
        return chosen.float() if chosen.dtype in (torch.float16, torch.bfloat16) else chosen

    def _find(self, outputs: Outputs, name: str | None) -> Any:
        if isinstance(outputs, Mapping):
            names = list(outputs)
            if name is None or name in outputs:
                return outputs[names[0] if name is None else name]
            raise TrainingError(f"loss: the model has no output {name!r}; it has {', '.join(map(str, names))}")
        if not isinstance(outputs, tuple | list):
            if name is None or len(self.terms) == 1:
                return outputs
            raise TrainingError(f"loss: the model has one output, and there are losses for {self._names(2)}")
        if name is None:
            return outputs[0]
        names = self._names(len(outputs), outputs)
        if name not in names:
            raise TrainingError(f"loss: the model has no output {name!r}; it has {', '.join(names)}")
        return outputs[names.index(name)]

    def _names(self, count: int, outputs: Any = None) -> list[str]:
        """Of a tuple's members: the graph's, a named tuple's, or those of the losses in their order."""
        if len(self._outputs) == count:
            return list(self._outputs)
        if hasattr(outputs, "_fields"):
            return list(outputs._fields)
        names = [term.output or "" for term in self.terms]
        return names if len(names) == count else [str(index) for index in range(count)]

    def _label(self, outputs: Outputs, batch: Batch, term: Term) -> torch.Tensor:
        label, wanted = batch[term.label], term.loss.label_type(self._pick(outputs, term))
        if label.dtype == wanted:
            return label
        if wanted.is_floating_point or not label.is_floating_point():
            return label.to(wanted)
        raise TrainingError(
            f"the loss of {term.loss.name} needs labels as whole numbers, the field {term.label!r} has {label.dtype}; "
            "convert them, or choose a loss of regression such as mse"
        )


def sum_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, of one or more scalars."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


def _single(config: TrainConfig, loss: object, fields: Sequence[str]) -> Term:
    if config.next_token:
        if loss == "cross_entropy":
            loss = {"name": "cross_entropy", "axis": -1}
        return Term(None, NEXT_TOKEN, 1.0, GraphLoss(make_loss(loss), "output"))
    usual = next((name for name in (LABEL, *LABELS) if name in fields), LABEL)
    label, weight, loss = _parts(loss, config.label or usual)
    return Term(None, _known(label, fields, "label"), weight, GraphLoss(make_loss(loss), "output"))


NEXT_TOKEN = "next_token"
"""The field of labels that `TrainConfig.next_token` makes."""


def _term(name: str, value: object, fields: Sequence[str]) -> Term:
    label, weight, loss = _parts(value, name)
    label = _known(label, fields, f"loss.{name}.label")
    return Term(name, label, weight, GraphLoss(make_loss(loss, f"loss.{name}"), name))


def _parts(value: object, label: str) -> tuple[str, float, object]:
    """(label, weight, loss) of a name, a table or a loss."""
    if not isinstance(value, Mapping):
        return label, 1.0, value
    table = dict(value)
    label, weight = str(table.pop("label", label)), number("loss", "weight", table.pop("weight", 1.0))
    # In Python the loss itself may stand in the table: {"loss": losses.mse(), "weight": 0.5}.
    return label, weight, table.pop("loss") if set(table) == {"loss"} else table


def _known(label: str, fields: Sequence[str], key: str) -> str:
    if label in fields:
        return label
    raise TrainingError(
        f"{key}: the data have no field {label!r} for the labels; they have {', '.join(fields)}; name the field with "
        "label=, which may be an input, as for an autoencoder"
    )
