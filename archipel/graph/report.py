"""What an import did, kept in the model's metadata and so in its file."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import onnx_ir as ir

DEVIATION_KEY = "archipel.import_deviation"
REPORT_KEY = "archipel.import"


@dataclass(frozen=True)
class ImportReport:
    """Where a model came from, and how far it is from its source.

    `deviation`: largest absolute difference over the largest absolute value of an output, on `samples` sample inputs;
    None where it could not be compared, and then `notes` says why. `opset` is the source's, None if it is not ONNX.
    `notes` are sentences for people: what was changed, and what could not be done.
    """

    source: str
    opset: int | None = None
    deviation: float | None = None
    samples: int = 0
    notes: tuple[str, ...] = ()

    def with_notes(self, *notes: str) -> ImportReport:
        return replace(self, notes=(*self.notes, *notes))

    def record(self, model: ir.Model) -> None:
        """Write it into the model's metadata."""
        model.metadata_props[REPORT_KEY] = json.dumps(
            {"source": self.source, "opset": self.opset, "samples": self.samples, "notes": self.notes}
        )
        if self.deviation is None:
            model.metadata_props.pop(DEVIATION_KEY, None)
        else:
            model.metadata_props[DEVIATION_KEY] = f"{self.deviation:.3g}"

    @classmethod
    def of(cls, model: ir.Model) -> ImportReport | None:
        """The report in a model's metadata; None if there is none that can be read."""
        try:
            found = json.loads(model.metadata_props[REPORT_KEY])
            deviation = model.metadata_props.get(DEVIATION_KEY)
            return cls(
                source=str(found["source"]),
                opset=None if found["opset"] is None else int(found["opset"]),
                deviation=None if deviation is None else float(deviation),
                samples=int(found["samples"]),
                notes=tuple(map(str, found["notes"])),
            )
        except (KeyError, TypeError, ValueError):  # anybody may have written the file
            return None
