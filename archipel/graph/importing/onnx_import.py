"""Import of ONNX files: normalized, cleaned, the batch made symbolic, and the result compared with the file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from archipel.errors import ModelImportError
from archipel.graph.batch import BATCH, STAYS, FixedBatchError, fixed_batch, free_batch
from archipel.graph.check import refuse_foreign, refuse_types
from archipel.graph.importing.cleaning import clean
from archipel.graph.importing.comparison import HALF_TOLERANCE, TOLERANCE, CannotRunError, Reference, deviation
from archipel.graph.importing.half import widen
from archipel.graph.importing.loading import free_name, normalize
from archipel.graph.importing.merged import separate_statistics
from archipel.graph.importing.samples import KINDS, sample, sizes
from archipel.graph.importing.sources import read
from archipel.graph.opset import opset_of
from archipel.graph.parameters import FIXED_KEY, NAMES_KEY, STATE_KEY, parameter_names, record_parameters
from archipel.graph.report import CONVERSION_KEY, DEVIATION_KEY, REPORT_KEY, ImportReport
from archipel.graph.shapes import dims, rename_size
from archipel.library_errors import one_line

_RANDOM = frozenset({"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"})
_EXAMPLES = 3
_FOLDED = "pkg.onnxscript.optimizer.folded_from"  # what PyTorch's exporter writes about constants that it folded


def load(path: str | os.PathLike[str], dynamic_batch: bool = True) -> ir.Model:
    """Read an ONNX file, its external data included, and import it. Raises ModelImportError that names the file."""
    proto = read(path)
    try:
        return import_onnx(proto, dynamic_batch)
    except ModelImportError as error:
        raise ModelImportError(f"{os.fspath(path)}: {error}") from error.__cause__


def import_onnx(proto: onnx.ModelProto, dynamic_batch: bool = True) -> ir.Model:
    """What `Model.from_onnx` does after reading the file. Raises ModelImportError."""
    refuse_foreign(proto)
    model = normalize(proto)
    refuse_types(model)
    if any(entry.key == NAMES_KEY for entry in proto.metadata_props):
        _serialize(model)
        return model  # `Model.save` wrote this file: it is clean, and has its report
    # Anybody may have written these into the file: only this import says what they are.
    for key in (NAMES_KEY, STATE_KEY, FIXED_KEY, DEVIATION_KEY, REPORT_KEY, CONVERSION_KEY):
        model.metadata_props.pop(key, None)
    constants = (node for node in model.graph.all_nodes() if node.op_type == "Constant")
    given = set(model.graph.initializers) | {str(node.outputs[0].name) for node in constants}
    try:
        for value in model.graph.initializers.values():
            if value.const_value is not None:
                value.const_value.numpy()  # raises now, not in training, if the content does not fit the shape
        notes = widen(model)
        clean(model)
        apart = separate_statistics(model)
    except ModelImportError:
        raise
    except Exception as error:
        # Constant folding evaluates nodes in NumPy, which may raise anything for inputs that no runtime would accept.
        raise ModelImportError(f"a weight or constant of the graph cannot be computed: {one_line(error)}") from error
    tolerance = HALF_TOLERANCE if notes else TOLERANCE
    record_parameters(model, [name for name in parameter_names(model) if not _is_computed_factor(model, name, given)])
    origin = " ".join(filter(None, (proto.producer_name, proto.producer_version)))
    report = ImportReport(
        f"ONNX ({origin})" if origin else "ONNX", opset_of(proto.opset_import), notes=(*notes, *apart)
    )
    source, why = _run_source(proto, model)
    if source is None:
        report = report.with_notes(f"not compared with its source: {why}")
    else:
        report = report.with_notes(*_name_batch(model, source))
    if dynamic_batch and fixed_batch(model) is not None:
        model, report = _with_free_batch(model, source, tolerance, report)
    elif source is not None:
        report = _compare(model, source, tolerance, report)
    report.record(model)
    return model


def _is_computed_factor(model: ir.Model, name: str, given: set[str]) -> bool:
    """Whether this is one number that folding has computed, here or in the exporter, such as the factor of attention.

    It stands for no tensor of the source, so training must not move it.
    """
    value = model.graph.initializers[name]
    single = value.const_value is not None and value.const_value.size == 1
    return single and (name not in given or _FOLDED in value.metadata_props)


@dataclass(frozen=True)
class _Source:
    """The unchanged file in ONNX Runtime; `known`: pairs of sample inputs and the file's outputs for them; `sizes`: the
    symbolic sizes of these inputs."""

    runtime: Reference
    known: list[tuple[dict[str, np.ndarray], list[np.ndarray]]]
    sizes: dict[str, int]


def _run_source(proto: onnx.ModelProto, model: ir.Model) -> tuple[_Source | None, str]:
    """The source with its outputs for sample inputs; or None, and why it cannot be run."""
    drawn = next((n for n in model.graph.all_nodes() if n.domain == "" and n.op_type in _RANDOM), None)
    if drawn is not None:
        return None, f"{drawn.op_type} {drawn.name!r} draws other numbers in each run"
    try:
        runtime = Reference(proto.SerializeToString())
    except CannotRunError as error:
        return None, f"ONNX Runtime does not open it ({error})"
    why = "no sample inputs fit it"
    # A graph may not run with every choice of the symbolic sizes: the first with which all kinds of samples run.
    for chosen in sizes(model):
        try:
            known = []
            for kind in KINDS:
                feed = sample(model, kind, chosen)
                known.append((feed, runtime.run(feed)))
            return _Source(runtime, known, chosen), ""
        except ValueError as error:
            return None, str(error)
        except CannotRunError as error:
            why = f"ONNX Runtime does not run it on sample inputs ({error})"
    return None, why


def _name_batch(model: ir.Model, source: _Source) -> list[str]:
    """Give axes without a name in the file the batch's name where the source takes no other size. Returns notes.

    States of recurrent layers have the batch on their second axis, and not every exporter names it.
    """
    batch = next((dims(value)[0] for value in model.graph.inputs if value.shape is not None and dims(value)), None)
    if not isinstance(batch, str):
        return []
    notes = []
    for value in model.graph.inputs:
        for axis, name in enumerate(dims(value)):
            unnamed = axis > 0 and name == free_name(value, axis)
            if not isinstance(name, str) or not unnamed or source.sizes[name] != source.sizes[batch]:
                continue
            try:
                source.runtime.run(sample(model, KINDS[0], {**source.sizes, name: source.sizes[batch] + 1}))
            except CannotRunError:
                rename_size(model.graph, name, batch)
                notes.append(f"axis {axis} of {value.name!r} is the batch: the source takes no other size there")
    return notes


def _compare(model: ir.Model, source: _Source, tolerance: float, report: ImportReport) -> ImportReport:
    apart = _deviation(model, source, narrow=tolerance > TOLERANCE)
    if not apart <= tolerance:  # refuses NaN as well
        raise ModelImportError(
            f"the import differs from its source by {apart:.2g} of the largest output on sample inputs; {tolerance:g} "
            "is allowed"
        )
    return replace(report, deviation=apart, samples=len(source.known))


def _deviation(model: ir.Model, source: _Source, narrow: bool) -> float:
    try:
        ours = Reference(_serialize(model))
        return max(deviation(ours.run(feed), outputs, narrow) for feed, outputs in source.known)
    except CannotRunError as error:
        raise ModelImportError(f"ONNX Runtime runs the source, but not the import: {error}") from None


def _with_free_batch(
    model: ir.Model, source: _Source | None, tolerance: float, report: ImportReport
) -> tuple[ir.Model, ImportReport]:
    """The model with a symbolic batch if samples show that examples are independent, else with its fixed one.

    Two tests: with the batch of the source it computes the same as the source; with a larger one, and for an example
    alone, the same as the source does for these examples.
    """
    size = fixed_batch(model) or 1
    together = _EXAMPLES if size == 1 else 2 * size
    try:
        free = free_batch(model)
        if source is None:
            raise FixedBatchError("it cannot be compared with its source")
        compared = _compare(free, source, tolerance, report)
        apart = _batch_deviation(free, source, size, together)
        if not apart <= tolerance:
            raise FixedBatchError(f"examples of a batch influence each other ({apart:.2g} of the largest output)")
        checked = f"{size} and {together}" if size == 1 else f"1, {size} and {together}"
        notes = [f"the batch, {size} in the source, is symbolic; checked with batches of {checked}"]
        before, after = model.graph.initializers, free.graph.initializers
        cut = [name for name in parameter_names(free) if dims(before[name]) != dims(after[name])]
        if cut:
            notes.append(f"weights that were the same for each example have one row now: {', '.join(cut)}")
        return free, replace(compared, deviation=max(apart, compared.deviation or 0.0)).with_notes(*notes)
    except (FixedBatchError, ModelImportError) as error:
        why = f"{STAYS}{size}, as in the source: {error}"
    return model, (report if source is None else _compare(model, source, tolerance, report)).with_notes(why)


def _batch_deviation(free: ir.Model, source: _Source, size: int, together: int) -> float:
    """How far the results for a larger batch, and for one example, are from the source's for batches of `size`."""
    try:
        runtime = Reference(_serialize(free))
        return max(_differences(free, runtime, source.runtime, size, together))
    except CannotRunError as error:
        raise FixedBatchError(f"ONNX Runtime does not run another batch: {error}") from None
    except ValueError as error:
        raise FixedBatchError(f"a larger batch cannot be compared: {error}") from None


def _differences(free: ir.Model, ours: Reference, theirs: Reference, size: int, together: int) -> Iterator[float]:
    batched = {value.name for value in free.graph.inputs if value.shape}

    def rows(feed: dict[str, np.ndarray], start: int, count: int) -> dict[str, np.ndarray]:
        return {name: array[start : start + count] if name in batched else array for name, array in feed.items()}

    for kind in KINDS[:2]:
        feed = sample(free, kind, {BATCH: together}, seed=1)
        parts = [theirs.run(rows(feed, start, size)) for start in range(0, together, size)]
        alone = [] if size == 1 else ours.run(rows(feed, 0, 1))
        for place, (value, found, *expected) in enumerate(zip(free.graph.outputs, ours.run(feed), *parts)):
            # Outputs without a batch axis depend on no example: the source's first answer is the only one.
            carried = value.shape is not None and value.shape and not isinstance(value.shape[0], int)
            yield deviation([found], [np.concatenate(expected)] if carried else expected[:1])
            if alone:
                yield deviation([alone[place]], [expected[0][:1] if carried else expected[0]])


def _serialize(model: ir.Model) -> bytes:
    try:
        data: bytes = ir.to_proto(model).SerializeToString()
    except (ir.serde.SerdeError, ValueError) as error:
        # The innermost error says what is wrong; those around it name protobuf messages.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ModelImportError(f"cannot be written as ONNX again: {cause}") from error
    return data
