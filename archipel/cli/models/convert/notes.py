"""What an import and a conversion did on their own, as `archipel convert` and `archipel inspect` tell it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from archipel.bundle.reader import BundleContents
from archipel.cli.input_output.spelling import spelled

if TYPE_CHECKING:
    from archipel.graph import ImportReport


def made_by(bundle: BundleContents) -> dict[str, Any]:
    """The report of the import and the notes of the conversion, which `predict` carries, as values for JSON.

    "import" is None for a model that no importer made, "preprocessing" empty where there is none. Raises
    MissingExtraError.
    """
    from archipel.graph.report import read_reports  # first: its error names the missing extra
    from archipel.cli.models.convert.spelling import RULES  # isort: skip
    from archipel.preprocessing.description import describe_file

    program = next(name for name, each in bundle.manifest.programs.items() if each.kind == "predict")
    report, conversion = read_reports(bundle.program_path(program))
    notes = [spelled(note, RULES) for note in conversion]
    return {
        "import": None if report is None else _facts(report),
        "conversion": notes,
        "preprocessing": describe_file(bundle.program_path(program)),
    }


def note_lines(made: Mapping[str, Any]) -> list[str]:
    """The result of `made_by` in plain English, a line for each."""
    return [_one_line(text) for text in _texts(made)]


def _one_line(text: str) -> str:
    """Names of the source may have any characters, which must not write lines or colours of their own."""
    return "".join(character if character.isprintable() else " " for character in text)


def _texts(made: Mapping[str, Any]) -> list[str]:
    report, lines = made["import"], list(made["conversion"])
    lines += preparation_lines(made["preprocessing"])
    if report is None:
        return lines
    opset = "" if report["opset"] is None else f", opset {report['opset']}"
    if report["deviation"] is None:
        apart = "its answers are not compared with the source's"
    elif not report["deviation"]:
        apart = f"on {report['samples']} samples its answers are the source's"
    else:
        apart = (
            f"on {report['samples']} samples its answers differ from the source's by at most "
            f"{report['deviation']:.2g} of the largest"
        )
    return [f"read from {report['source']}{opset}; {apart}", *report["notes"], *lines]


def preparation_lines(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The transforms in front of a model in one line; none where there are none."""
    if not tables:
        return []
    from archipel.preprocessing.description import text_of

    return [_one_line(f"prepares raw inputs: {text_of(tables)}")]


def _facts(report: ImportReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "opset": report.opset,
        "deviation": report.deviation,
        "samples": report.samples,
        "notes": list(report.notes),
    }
