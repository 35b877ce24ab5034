"""The options of `archipel convert` for an analysis: which statistics of the model's outputs devices add up."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.settings import settings_of
from archipel.converter import Analysis, Histogram, Mean, Quantiles, Sum
from archipel.converter.options import MAX_EXAMPLES
from archipel.converter.statistics import AnyStatistic
from archipel.errors import CommandError
from archipel.toml_files import read_toml

KINDS: Mapping[str, type[Any]] = {"sum": Sum, "mean": Mean, "histogram": Histogram, "quantiles": Quantiles}
"""What `kind` of a [[statistic]] table can be."""


@dataclass(frozen=True)
class AnalysisOptions:
    """Where the statistics are listed."""

    analysis: Path | None

    def read(self) -> Analysis | None:
        """The analysis, None without a file. Raises ArchipelError that names file, table and field; OSError."""
        if self.analysis is None:
            return None
        where = f"--analysis {self.analysis}"
        content = read_toml(self.analysis)
        tables = content.pop("statistic", None)
        most = content.pop("max_examples", MAX_EXAMPLES)
        if content or not isinstance(tables, list) or not tables:
            extra = f"; unknown: {', '.join(content)}" if content else ""
            raise CommandError(f"{where}: expected max_examples and [[statistic]] tables, each with a kind{extra}")
        statistics = [_statistic(f"{where}, statistic {n}", table) for n, table in enumerate(tables, start=1)]
        return Analysis(statistics, max_examples=most)


def _statistic(where: str, table: object) -> AnyStatistic:
    fields = dict(table) if isinstance(table, Mapping) else {}
    kind = KINDS.get(str(fields.pop("kind", "")))
    if kind is None:
        raise CommandError(f"{where}: kind is one of {', '.join(KINDS)}")
    known = settings_of(kind)
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise CommandError(f"{where}: no field {unknown[0]!r}; there are kind, {', '.join(known)}")
    hints = typing.get_type_hints(kind)
    try:
        for name, value in fields.items():
            msgspec.convert(value, hints[name])
    except msgspec.ValidationError as error:
        raise CommandError(f"{where}: {name}: {error}") from None
    missing = [name for name, setting in known.items() if setting.needed and name not in fields]
    if missing:
        raise CommandError(f"{where}: {missing[0]} is missing")
    made: AnyStatistic = kind(**fields)
    return made


analysis_options = option_group(
    "analysis",
    AnalysisOptions,
    click.option("--analysis", type=click.Path(path_type=Path), metavar="TOML",
                 help="Statistics of the model's outputs that an analytics task adds up over a population: "
                 "[[statistic]] tables with kind, name and bounds; --list statistics lists the kinds. In place of "
                 "--loss."),
)  # fmt: skip
