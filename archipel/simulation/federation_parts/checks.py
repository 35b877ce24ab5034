"""What in a federation's file does not fit together, found before any data are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from archipel.errors import ArchipelError, SimulationError
from archipel.privacy.central import rounds_mistakes
from archipel.protocol import written
from archipel.protocol.mistakes import Mistakes
from archipel.protocol.operator.aggregation import ROOTED
from archipel.protocol.operator.tasks import TaskRequest
from archipel.simulation.federation_parts.data import read_partition
from archipel.simulation.federation_parts.models import check_models
from archipel.simulation.federation_parts.settings import ONCE, ROOT, Settings, TrainingPart
from archipel.simulation.federation_parts.training import make_training


def settings_mistakes(found: Settings) -> list[str]:
    """Each text begins with the key that is wrong."""
    parts = (_mistakes_of_data, _mistakes_of_task, _mistakes_of_root, _mistakes_of_noise)
    return [text for part in parts for text in part(found)]


def table_mistakes(table: Mapping[str, Any]) -> list[str]:
    """What is wrong inside of [training], [strategy] and [partition] of a file of which other fields are wrong.

    Fields of them that cannot be read, which the conversion of the file tells, are left out.
    """
    mistakes = Mistakes()
    given = table.get("training")
    training = {name: _read(given, name, kind) for name, kind in written.type_hints(TrainingPart).items()}
    with mistakes.collected():
        part = TrainingPart(**{name: value for name, value in training.items() if value is not None})
        make_training(part, _read(table, "strategy", str | dict[str, Any]))
    with mistakes.collected():
        partition = _read(table, "partition", dict[str, Any])
        if partition is not None:
            read_partition(partition)
    return mistakes.texts


def _read(table: object, name: str, kind: Any) -> Any:
    """The field as a `kind`; None where it is not there, or is something else."""
    if not isinstance(table, Mapping) or name not in table:
        return None
    try:
        return written.convert_one(name, table[name], kind)
    except (ArchipelError, ValueError):
        return None


def check_sources(found: Settings) -> None:
    """Raise SimulationError unless there is one model, or several of some devices each."""
    if (found.model is None) == (not found.models):
        raise SimulationError("model: give a table [model], or of devices with different models several [[models]]")
    if found.model is not None:
        _ = found.model.source
    else:
        check_models(found.models)


def _mistakes_of_data(found: Settings) -> Iterator[str]:
    if (found.data.python is None) == (found.data.train is None):
        yield "data: give train, a file, or python, a function"
    if found.data.arguments and found.data.python is None:
        yield "data.arguments: are for python; files have data.options"
    if found.data.hold_out is not None and found.data.test is not None:
        yield "data.hold_out: there is a file `test` as well; leave one of them out"


def _mistakes_of_task(found: Settings) -> Iterator[str]:
    known = [*TaskRequest.__struct_fields__, ROOT]
    for name in found.task:
        if name not in known:
            yield f"task.{name}: no such field of a task; {written.suggest(name, known)}"
        if name in (*ONCE, "bundle"):
            where = f"outside of [task], as `{name}`" if name in ONCE else "into [model]"
            yield f"task.{name}: write it {where}"


def _mistakes_of_root(found: Settings) -> Iterator[str]:
    if found.aggregation.root:
        yield "aggregation.root: is a device of a server; write it into [task], as `root`"
    for key, given in ((ROOT, found.root is not None), (f"task.{ROOT}", ROOT in found.task)):
        if given and found.aggregation.rule != ROOTED:
            rule = found.aggregation.rule
            yield f"{key}: rule {rule!r} takes no update as a root; set rule {ROOTED!r}, or leave it out"


def _mistakes_of_noise(found: Settings) -> Iterator[str]:
    # Without a clock a simulation has no asynchronous rounds.
    mode = str(found.task.get("mode", "")) if found.system is not None else ""
    for text in rounds_mistakes(
        found.differential_privacy, privacy=found.privacy, mode=mode, aggregation=found.aggregation,
        secure_groups=found.secure_groups,
    ):  # fmt: skip
        yield f"differential_privacy: {text}"
