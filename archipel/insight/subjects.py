"""A bundle or an ONNX file as a subject of the page, together with what its operators are measured with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx.external_data_helper import ExternalDataInfo

from archipel.bundle import Bundle
from archipel.bundle.reader import BundleContents
from archipel.bundle.roles import Parameter
from archipel.compression.stored import read_program, read_stored
from archipel.errors import InsightError, ModelImportError
from archipel.graph import Model
from archipel.graph.importing.sources import tensors
from archipel.graph.walk import levels
from archipel.insight.counting import check_file
from archipel.insight.graph_reading import GraphReader
from archipel.insight.limits import MAX_FILE_BYTES, MAX_PAGE_NODES, MAX_TENSORS, cut
from archipel.insight.page_data import GraphData, Subject, TensorData
from archipel.insight.tensor_statistics import Describer
from archipel.library_errors import one_line

_ORDER = ("predict", "train", "features", "evaluate", "begin", "finish", "refresh", "analyze")


@dataclass(frozen=True)
class OpenGraph:
    """A graph that was read: the model, the file that runs, arrays that its inputs are, and its data on the page."""

    model: Model
    file: Path
    tensors: Mapping[str, np.ndarray]
    data: GraphData
    places: Mapping[ir.Node, int]


@dataclass(frozen=True)
class OpenSubject:
    """A subject with its graphs as they are in memory, in the order of the page, and its weights by name.

    Example: see `archipel.insight.read_bundle`.
    """

    subject: Subject
    graphs: Sequence[OpenGraph] = ()
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def main(self) -> int:
        """The place of the graph that predicts; the first where there is none. Raises InsightError without graphs."""
        if not self.graphs:
            raise InsightError(f"{self.subject.name}: no graph of it can be shown: {'; '.join(self.subject.notes)}")
        return next((at for at, graph in enumerate(self.graphs) if graph.data.kind == "predict"), 0)


def read_bundle(
    bundle: BundleContents,
    name: str,
    batch: int = 1,
    programs: Sequence[str] = (),
    size: int | None = None,
    weights: Mapping[str, np.ndarray] | None = None,
) -> OpenSubject:
    """A bundle with the graphs of its programs.

    Arguments:
        bundle: opened; the page says whether it is verified.
        name: what the page calls it.
        batch: what symbolic dimensions count as.
        programs: names of the programs to show; none: all.
        size: bytes of the file.
        weights: arrays that take the place of the bundle's of the same names, such as those of a later version.

    Raises BundleError for a program that it does not have, and what reading its weights raises. A graph that cannot be
    read is told on the page.

    Example:
        opened = read_bundle(open_bundle("digits.bundle", keys), "digits")
        print([graph.data.name for graph in opened.graphs])
    """
    manifest = bundle.manifest
    verified = isinstance(bundle, Bundle)
    subject = Subject(
        name=cut(name),
        kind="bundle",
        facts=[
            ("name", cut(manifest.name)),
            ("digest", bundle.digest),
            ("signature", "verified" if verified else "NOT verified: anyone may have written it"),
            ("strategy", cut(str(manifest.strategy or "none"))),
            ("format", str(manifest.format)),
        ],
    )
    if size is not None:
        subject.facts.append(("size", f"{size:,} bytes"))
    limits = manifest.limits
    for what, number, unit in (
        ("memory at most, as the bundle states it", limits.peak_bytes, "bytes"),
        ("work for one example, as the bundle states it", limits.flops_per_example, "FLOPs"),
        ("upload of a round at most, as the bundle states it", limits.upload_bytes, "bytes"),
    ):
        if number:
            subject.facts.append((what, f"{number:,} {unit}"))
    for wanted in programs:
        bundle.program(wanted)  # raises where there is none
    names = list(programs) or sorted(manifest.programs, key=lambda each: (_kind_place(bundle, each), each))
    tensors = {**bundle.tensors, **_fitting(weights or {}, bundle, subject.notes)}
    graphs, nodes, describe = list[OpenGraph](), 0, Describer()
    for each in names:
        try:
            check_file(bundle.program_path(each))
            reader = GraphReader(each, read_program(bundle, each, tensors), batch, tensors, describe)
        except (ModelImportError, OSError) as error:
            subject.notes.append(f"program {cut(each)}: {one_line(error)}")
            continue
        nodes += len(reader.data.nodes)
        if nodes > MAX_PAGE_NODES:
            subject.notes.append(
                f"program {cut(each)} and later ones: too many nodes for one page; name one (--program)"
            )
            break
        graphs.append(OpenGraph(reader.model, bundle.program_path(each), tensors, reader.data, reader.places))
    subject.graphs = [graph.data for graph in graphs]
    trained = {
        port.tensor
        for program in manifest.programs.values()
        if program.kind == "train"
        for port in program.outputs
        if isinstance(port, Parameter)
    }
    subject.tensors = tensor_rows(tensors, trained, subject.notes, describe)
    return OpenSubject(subject, graphs, tensors)


def read_onnx(path: str | os.PathLike[str], batch: int = 1) -> OpenSubject:
    """An ONNX file, of any opset and domain, with external data beside it.

    Raises ModelImportError for what is no model, for one beyond the limits, and for external data elsewhere; OSError.

    Example:
        opened = read_onnx("model.onnx", batch=8)
        print(opened.subject.facts)
    """
    path = Path(path)
    check_file(path)
    _check_external(path)
    model = read_stored(path)
    reader = GraphReader("graph", model, batch)
    subject = Subject(
        name=cut(path.name),
        kind="onnx",
        facts=[
            ("size", f"{path.stat().st_size:,} bytes"),
            ("opset", reader.data.opset),
            ("IR version", str(model.ir.ir_version)),
            ("made by", cut(" ".join(filter(None, (model.ir.producer_name, model.ir.producer_version))) or "unknown")),
        ],
    )
    arrays = _stored_arrays(model)
    subject.tensors = tensor_rows(arrays, set(), subject.notes, Describer())
    graph = OpenGraph(model, path, {}, reader.data, reader.places)
    subject.graphs = [reader.data]
    return OpenSubject(subject, [graph], arrays)


def _fitting(weights: Mapping[str, np.ndarray], bundle: BundleContents, told: list[str]) -> dict[str, np.ndarray]:
    """The weights that the bundle has, in the same type and shape; `told` gets a sentence about others."""
    found = {}
    for name, array in weights.items():
        own = bundle.tensors.get(name)
        if own is not None and (own.dtype, own.shape) == (array.dtype, array.shape):
            found[name] = array
    if len(found) < len(weights):
        told.append(f"{len(weights) - len(found)} tensors of the weights are not those of the bundle, and left out")
    return found


def tensor_rows(
    arrays: Mapping[str, np.ndarray], trained: set[str], told: list[str], describe: Describer
) -> list[TensorData]:
    """Statistics of tensors by name, MAX_TENSORS at most; `told` gets a sentence where there are more."""
    rows = [
        TensorData(
            name=cut(name),
            dtype=array.dtype.name,
            shape=list(array.shape),
            bytes=array.nbytes,
            trained=name in trained,
            statistics=describe(array),
        )
        for name, array in list(arrays.items())[:MAX_TENSORS]
    ]
    if len(arrays) > MAX_TENSORS:
        told.append(f"{len(arrays):,} tensors; the first {MAX_TENSORS:,} are shown")
    return rows


def _kind_place(bundle: BundleContents, name: str) -> int:
    kind = bundle.program(name).kind
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _stored_arrays(model: Model) -> dict[str, np.ndarray]:
    found = {}
    for level in levels(model.ir.graph):
        for name, value in level.initializers.items():
            if value.const_value is not None and value.dtype != ir.DataType.STRING:
                found[name] = value.const_value.numpy()
    return found


def _check_external(path: Path) -> None:
    """Raise ModelImportError for external data that lie elsewhere than beside the file, or are too large together.

    The onnx package refuses such places, too, and by then has read what came before.
    """
    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except Exception as error:  # protobuf raises what it likes
        raise ModelImportError(f"{path}: not a valid ONNX file ({one_line(error)}); export it again") from error
    folder, total = path.resolve().parent, 0
    for tensor in tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        try:
            place = ExternalDataInfo(tensor)
            file = folder / place.location
            whole = file.resolve().is_relative_to(folder) and not file.is_symlink() and file.is_file()
            size = place.length or (file.stat().st_size if whole else 0)
        except (ValueError, OSError, TypeError, AttributeError) as error:
            raise ModelImportError(f"{path}: tensor {tensor.name[:64]!r}: {one_line(error)}") from None
        if not whole:
            raise ModelImportError(
                f"{path}: tensor {tensor.name[:64]!r} lies in {place.location[:64]!r}, which is no file in the folder "
                "of the model; put it there, or export the model with its weights"
            )
        total += size
        declared = math.prod(tensor.dims)
        if total > MAX_FILE_BYTES or declared < 0:
            raise ModelImportError(f"{path}: more than {MAX_FILE_BYTES:,} bytes of external data, which cannot be read")
