"""The portable IR: ONNX graphs at one opset, thin on `onnx_ir`."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.graph.build import Builder as Builder
from archipel.graph.check import check_model as check_model
from archipel.graph.model import Model as Model
from archipel.graph.model import TensorInfo as TensorInfo
from archipel.graph.parameters import promote as promote
from archipel.graph.report import ImportReport as ImportReport
from archipel.importer_registry import IMPORTERS as IMPORTERS

__all__ = ["IMPORTERS", "Builder", "ImportReport", "Model", "TensorInfo", "check_model", "promote"]
