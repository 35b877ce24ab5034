"""Metrics of `torchmetrics` by name, with the task, classes and ignored label that follow from the loss."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from archipel.errors import MissingExtraError, TrainingError
from archipel.training.cloud.objective.objective import Term
from archipel.training.losses import BinaryCrossEntropy, CrossEntropy

if TYPE_CHECKING:
    import torch

_MANY = 256
"""Classes or labels of a metric that is made to see whether it can be; no smaller than what asks for the best k."""

_MOST_AXES = 8


class Metrics:
    """The metrics of one output.

    Arguments:
        wanted: names, such as "F1Score" or "f1_score", or tables of a name and arguments.
        term: the output's loss, which says what kind of answers these are.

    Raises TrainingError for a name that torchmetrics does not have, and for arguments that it refuses;
    MissingExtraError without torchmetrics.
    """

    def __init__(self, wanted: Sequence[object], term: Term) -> None:
        self._term = term
        self._wanted = [_parse(each) for each in wanted]
        for name, arguments in self._wanted:
            known = _arguments(_find(name)[1])
            for key in arguments:
                if key not in known:
                    raise TrainingError(f"metrics.{key}: {name} has no such argument; it has {', '.join(known)}")
            _try(name, arguments, term)
        self._made: dict[str, Any] | None = None

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Add a batch: outputs and labels as the loss has them."""
        if not self._wanted:
            return
        if self._made is None:
            self._made = {
                self._term.named(name): _make(name, arguments, self._term, output.shape).to(output.device)
                for name, arguments in self._wanted
            }
        for name, metric in self._made.items():
            try:
                metric.update(*_arranged(metric, self._term, output, label))
            except (ValueError, RuntimeError, TypeError) as error:
                raise TrainingError(f"metrics: {name}: {' '.join(str(error).split())}") from None

    def compute(self) -> dict[str, float]:
        """The metrics of all batches since the last call, by the names they were asked for."""
        results = {}
        for name, metric in (self._made or {}).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as: no positive samples; the number says so, too
                value = metric.compute()
            metric.reset()
            if getattr(value, "numel", lambda: 0)() != 1:
                raise TrainingError(f"metrics: {name} gives no single number; give it an average, such as 'macro'")
            results[name] = float(value)
        return results

    def higher_is_better(self, name: str) -> bool | None:
        """Whether more is better, of a metric by the name that `compute` gives it; None for a metric not here."""
        for own, _ in self._wanted:
            if self._term.named(own) == name:
                return bool(_find(own)[0].higher_is_better)
        return None


def _parse(value: object) -> tuple[str, dict[str, Any]]:
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return value["name"], {str(key): each for key, each in value.items() if key != "name"}
    raise TrainingError(f"metrics: expected the name of a torchmetrics class, or a table with a name, got {value!r}")


def _find(name: str) -> tuple[type[Any], type[Any]]:
    """(the class for a binary or continuous answer, the class to call) of a name."""
    try:
        # By domain: the package itself has deprecated doubles of some of them.
        from torchmetrics import classification, regression, text
    except ImportError as error:
        raise MissingExtraError("torchmetrics", "cloud") from error
    known: dict[str, Any] = {}
    for domain in (text, regression, classification):
        known |= {each.replace("_", "").lower(): getattr(domain, each) for each in domain.__all__}
    called = known.get(name.replace("_", "").lower())
    if called is None:
        near = get_close_matches(name.replace("_", "").lower(), known, n=1)
        hint = f"; did you mean {known[near[0]].__name__!r}?" if near else "; see the list in torchmetrics' pages"
        raise TrainingError(f"metrics: torchmetrics has no {name!r}{hint}")
    # A class of classification chooses one for its task when it is called, and knows itself nothing of what is better.
    binary = getattr(classification, f"Binary{called.__name__}", called)
    return binary, called


def _try(name: str, arguments: Mapping[str, Any], term: Term) -> None:
    """Make a metric before any output is there: a wrong argument shows before the training, and without validation."""
    several = (_MANY,) * _MOST_AXES
    if isinstance(term.loss.loss, BinaryCrossEntropy):
        # Whether these are several labels shows in the output alone; some arguments are for them.
        with suppress(TrainingError):
            _make(name, arguments, term, several)
            return
    _make(name, arguments, term, (_MANY, 1) if isinstance(term.loss.loss, BinaryCrossEntropy) else several)


def _make(name: str, arguments: Mapping[str, Any], term: Term, shape: Sequence[int]) -> Any:
    _, called = _find(name)
    given = dict(arguments)
    known = _arguments(called)
    for key, value in _defaults(term, shape).items():
        if key in known and value is not None:
            given.setdefault(key, value)
    if _by_task(called) and given.get("task") in ("multiclass", "multilabel") and "average" in known:
        given.setdefault("average", "micro" if "Accuracy" in called.__name__ else "macro")
    if _by_task(called) and "task" not in given:
        raise TrainingError(f"metrics: {name} is for classifications, and the loss of {term.loss.name} is none")
    try:
        return called(**given)
    except (TypeError, ValueError) as error:
        raise TrainingError(f"metrics: {name}: {' '.join(str(error).split())}") from None


def _arguments(metric: type[Any]) -> list[str]:
    known = inspect.signature(metric.__new__ if _by_task(metric) else metric.__init__).parameters.values()
    return [each.name for each in known if each.kind is not each.VAR_KEYWORD and each.name not in ("self", "cls")]


def _by_task(metric: type[Any]) -> bool:
    return "task" in inspect.signature(metric.__new__).parameters


def _defaults(term: Term, shape: Sequence[int]) -> dict[str, Any]:
    loss = term.loss.loss
    if isinstance(loss, CrossEntropy):
        classes = shape[loss.axis]
        return {"task": "multiclass", "num_classes": classes, "ignore_index": loss.ignore_index}
    if isinstance(loss, BinaryCrossEntropy):
        places = shape[-1] if len(shape) > 1 else 1
        return {"task": "binary"} if places == 1 else {"task": "multilabel", "num_labels": places}
    return {}


def _arranged(metric: Any, term: Term, output: torch.Tensor, label: torch.Tensor) -> tuple[Any, Any]:
    """Answers and labels in the axes that torchmetrics expects."""
    loss = term.loss.loss
    if isinstance(loss, CrossEntropy):
        # Its metrics of classification have the classes along axis 1, that of text along the last one.
        axis = -1 if type(metric).__name__ == "Perplexity" else 1
        return output.detach().movedim(loss.axis, axis), label
    if isinstance(loss, BinaryCrossEntropy):
        return output.detach().sigmoid(), (label > 0.5).long()
    flat = output.ndim > 1 and type(metric).__module__.startswith("torchmetrics.regression")
    return (output.detach().flatten(), label.flatten()) if flat else (output.detach(), label)
