"""What an import and a conversion did on their own; kept in the model's metadata and so in its file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from archipel.errors import ModelImportError

DEVIATION_KEY = "archipel.import_deviation"
REPORT_KEY = "archipel.import"
CONVERSION_KEY = "archipel.conversion"


@dataclass(frozen=True)
class ImportReport:
    """Where a model came from, and how far its results are from its source's.

    Attributes:
        source: kind of the source and the tool that wrote it.
        opset: the source's opset; None if it is not ONNX.
        deviation: largest absolute difference over the largest absolute value of an output, on `samples` sample inputs;
            None if the two could not be compared, and `notes` say why.
        notes: sentences for people: what the import changed, and what it could not do.

    Example:
        report = Model.from_torch(network, torch.zeros(2, 4)).import_report
        print(report.source, report.deviation, report.notes)
    """

    source: str
    opset: int | None = None
    deviation: float | None = None
    samples: int = 0
    notes: tuple[str, ...] = ()

    def with_notes(self, *notes: str) -> ImportReport:
        """A copy with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def record(self, model: ir.Model) -> None:
        """Write the report into the model's metadata."""
        model.metadata_props[REPORT_KEY] = json.dumps(
            {"source": self.source, "opset": self.opset, "samples": self.samples, "notes": self.notes}
        )
        if self.deviation is None:
            model.metadata_props.pop(DEVIATION_KEY, None)
        else:
            model.metadata_props[DEVIATION_KEY] = f"{self.deviation:.3g}"

    @classmethod
    def of(cls, model: ir.Model) -> ImportReport | None:
        """The report in a model's metadata; None if there is none, or one that is not well formed."""
        try:
            fields = json.loads(model.metadata_props[REPORT_KEY])
            deviation = model.metadata_props.get(DEVIATION_KEY)
            return cls(
                source=str(fields["source"]),
                opset=None if fields["opset"] is None else int(fields["opset"]),
                deviation=None if deviation is None else float(deviation),
                samples=int(fields["samples"]),
                notes=tuple(map(str, fields["notes"])),
            )
        except (
            KeyError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ):  # the file may be anybody's, with anything under this key
            return None


def record_conversion(model: ir.Model, notes: Sequence[str]) -> None:
    """Write into a program's metadata what its conversion did, in sentences for people."""
    if notes:
        model.metadata_props[CONVERSION_KEY] = json.dumps(list(notes))


def conversion_notes(model: ir.Model) -> tuple[str, ...]:
    """What `record_conversion` wrote; empty where there is nothing, or nothing well formed."""
    try:
        notes = json.loads(model.metadata_props.get(CONVERSION_KEY, "[]"))
        return tuple(map(str, notes)) if isinstance(notes, list) else ()
    except (ValueError, RecursionError):
        return ()


def read_reports(path: str | os.PathLike[str]) -> tuple[ImportReport | None, tuple[str, ...]]:
    """The report of the import and the notes of the conversion in an ONNX file, without reading its weights.

    Raises ModelImportError that names the file.
    """
    try:
        model = ir.from_proto(onnx.load(path, load_external_data=False))
    except Exception as error:  # the file may be anybody's: protobuf and onnx_ir each raise exceptions of their own
        raise ModelImportError(f"{os.fspath(path)}: not a valid ONNX file ({type(error).__name__})") from error
    return ImportReport.of(model), conversion_notes(model)
