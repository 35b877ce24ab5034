"""Refuses labels that are no classes, and says where in the data they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from archipel.datasets.checks import find_broken
from archipel.datasets.dataset import Dataset, Stream
from archipel.errors import TrainingError
from archipel.training.cloud.objective.objective import Objective, Outputs


def check_labels(objective: Objective, outputs: Outputs, batch: Mapping[str, Any], data: Dataset | Stream) -> None:
    """Refuse labels that are no classes, before the loss, which on a GPU would end the process for one.

    Arguments:
        objective: its losses.
        outputs: of the model; they say how many classes there are.
        batch: arrays by field, as they were read.
        data: where they come from.

    Raises TrainingError that names the place.
    """
    for term in objective.terms:
        labels = batch.get(term.label)
        if not isinstance(labels, np.ndarray):
            continue
        output = objective.output(outputs, term)
        wrong = term.loss.wrong_label(output, labels)
        if wrong is not None:
            classes = term.loss.classes(output) or 0
            found = find_broken(data, classes={term.label: classes}, ignored=term.loss.ignored)
            raise TrainingError(
                f"{found[0] if found else 'the data'}: field {term.label!r} has the label {wrong}, and the model has "
                f"{classes} classes, 0 to {classes - 1}; correct the label, give the model more classes, or set the "
                "loss's ignore_index"
            )
