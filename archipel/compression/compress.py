"""`compress`: apply a recipe to a model, part by part, resumable."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from archipel.compression.compressed import CompressedModel
from archipel.compression.distil import Distil
from archipel.compression.examples import Data, Examples
from archipel.compression.part import Part
from archipel.compression.recipe import check_parts, check_sets, write_recipe
from archipel.compression.report import Measured, Report, Step
from archipel.compression.score import check_classes, default_loss
from archipel.compression.work import Progress, Work
from archipel.durable import make_folder, sweep, write_durably
from archipel.errors import CompressionError
from archipel.graph import Model
from archipel.graph.check import check_model, refuse_not_finite
from archipel.training.losses import Loss
from archipel.training.step_engines import ONNX_RUNTIME

_STATE = "state.json"


def compress(
    model: Model,
    recipe: Sequence[Part],
    data: Data | None = None,
    calibration: Data | None = None,
    validation: Data | None = None,
    *,
    loss: Loss | None = None,
    seed: int = 0,
    engine: str = ONNX_RUNTIME,
    folder: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[CompressedModel, Report]:
    """Apply the parts of `recipe` to `model`, one after the other.

        small, report = compress(model, [StaticInt8()], calibration=images, validation=(images, labels))

    Arguments:
        model: stays as it is; the result has the same inputs and outputs.
        recipe: structure (pruning, low rank) first, then masks, then quantization; training after any of them.
        data: labelled examples to train on: arrays by input name with labels under "label", or a tuple, labels last.
        calibration: examples for the ranges of activations; labels are not needed. None: the first 512 of `data`.
        validation: labelled examples for the measurements in the report, and for choices such as `max_drop`.
        loss: None: cross entropy if the labels are whole numbers, else the squared error.
        seed: decides every random choice; the same arguments give the same bytes.
        engine: what fine-tunes, distils and trains with rounding: "onnxruntime"; "torch" for PyTorch on its best
            device, or "torch:cpu", "torch:cuda:1" and so on (the extra `cloud`).
        folder: for checkpoints: after Ctrl-C or a kill the same call goes on at the step where it was.
        on_progress: called with the progress of each step; may raise KeyboardInterrupt to stop.

    Returns the small model, and the report of what each part did.

    Raises CompressionError for a recipe or data that do not fit the model, GraphError for weights that are not finite.

    Example:
        small, report = archipel.compress(model, [StaticInt8()], data=data, validation=data)
        print(report.after.nbytes, "of", report.before.nbytes, "bytes")
    """
    parts = check_parts(recipe)
    refuse_not_finite(model.ir)
    sets = {
        "data": None if data is None else Examples.of(data, model, "data", labelled=True),
        "calibration": None if calibration is None else Examples.of(calibration, model, "calibration", labelled=False),
        "validation": None if validation is None else Examples.of(validation, model, "validation", labelled=True),
    }
    check_sets(parts, {"data": data, "calibration": calibration, "validation": validation})
    labelled = sets["validation"] or sets["data"]
    chosen = loss or default_loss(None if labelled is None else labelled.labels)
    for name in ("data", "validation"):
        if (examples := sets[name]) is not None:
            check_classes(examples, name, chosen, model)
    # The folder comes after all checks, so that a refused run leaves none.
    store = None if folder is None else _Store(Path(folder), _fingerprint(model, parts, sets, seed, engine))
    work = Work(model, loss=chosen, seed=seed, engine=engine, folder=None if store is None else store.folder,
                on_progress=on_progress, **sets)  # fmt: skip
    current = CompressedModel.of(model)
    steps: list[Step] = []
    if store is not None:
        current, steps, before = store.restore(current)
    else:
        before = None
    if before is None:
        before = _measure(current, work)
    for number, part in enumerate(parts, start=1):
        if number <= len(steps):
            continue
        work.begin(number, len(parts))
        work.progress(0, 1, type(part).__name__)
        started = time.monotonic()
        try:
            result = part.apply(current, work)
        except CompressionError as error:
            inside = _in_bodies(current)
            hint = f" outside of loops and branches; inside are {', '.join(inside)}" if inside else ""
            raise CompressionError(f"part {number} of the recipe, {type(part).__name__}: {error}{hint}") from error
        _check_signature(current, result, part)
        check_model(result.ir)
        current = result
        facts = dict(work.facts)
        if inside := _in_bodies(current):
            facts["left in loops and branches"] = inside
        seconds = time.monotonic() - started
        steps.append(Step(repr(part), seconds, _measure(current, work), facts))
        if store is not None:
            store.save(current, steps, before)
        work.progress(1, 1, type(part).__name__)
    result = current.copy()
    result.report = Report(write_recipe(parts), before, tuple(steps), seed)
    result.examples = {**(model.examples if isinstance(model, CompressedModel) else {}), **work.samples}
    return result, result.report


def _measure(model: CompressedModel, work: Work) -> Measured:
    deployed = model.deployed()
    return Measured.of(model, deployed, work.evaluate(deployed) if work.validated else None)


def _in_bodies(model: Model) -> list[str]:
    """The weights that only nodes in bodies read, as they are stored: parts work on layers of the main graph."""
    main = model.ir.graph
    found = []
    for name in model.parameter_names:
        uses = list(main.initializers[name].uses())
        if model.parameters[name].ndim > 1 and uses and all(use.node.graph is not main for use in uses):
            found.append(name)
    return found


def _check_signature(before: Model, after: Model, part: Part) -> None:
    if (before.inputs, before.outputs) != (after.inputs, after.outputs):
        raise CompressionError(
            f"{type(part).__name__} changed the model's inputs or outputs from {before.inputs} -> {before.outputs} to "
            f"{after.inputs} -> {after.outputs}"
        )


def _fingerprint(model: Model, parts: Sequence[Part], sets: dict[str, Examples | None], seed: int, engine: str) -> str:
    digest = hashlib.sha256(model.to_bytes())
    digest.update(write_recipe(parts).encode() + f"seed {seed}".encode())
    if engine != ONNX_RUNTIME:
        digest.update(f"engine {engine}".encode())
    for part in parts:
        if isinstance(part, Distil) and part.teacher is not None:
            # The recipe has only the path of a teacher, whose content may change.
            digest.update(_content(Path(part.teacher)))
    for name, examples in sets.items():
        for field, array in sorted((examples.feed if examples else {}).items()):
            digest.update(f"{name}/{field} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CompressionError(f"teacher {path}: {error.strerror or error}") from None


class _Store:
    """The folder of a resumable run: the model after the last finished part, the steps so far, training checkpoints.

    Files are written beside their place and moved there, so that each is whole after a kill. A part is finished when
    state.json names its model.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        make_folder(folder)
        sweep(folder)

    def restore(self, start: CompressedModel) -> tuple[CompressedModel, list[Step], Measured | None]:
        path = self.folder / _STATE
        if not path.exists():
            # What another run left first: killed in between, this one must not go on from its checkpoints.
            self._clean("")
            self._write(path, json.dumps({"run": self._fingerprint}).encode())
            return start, [], None
        try:
            state: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CompressionError(f"{path}: not the state of a run ({error}); choose another folder") from None
        if state.get("run") != self._fingerprint:
            raise CompressionError(
                f"{self.folder}: a run of another model, recipe, seed, data or engine; remove the folder or choose "
                "another"
            )
        if "steps" not in state:
            return start, [], None
        steps = [Step(s["part"], s["seconds"], Measured(**s["after"]), s["facts"]) for s in state["steps"]]
        before = Measured(**state["before"])
        form = None if state["training_form"] is None else Model(self._graph(state["training_form"]))
        return CompressedModel(self._graph(state["model"]), form), steps, before

    def _graph(self, name: str) -> ir.Model:
        """A graph as `save` wrote it, without the folding and renaming of an import, which would change later parts."""
        return ir.from_proto(onnx.load_model_from_string((self.folder / name).read_bytes()))

    def save(self, model: CompressedModel, steps: list[Step], before: Measured) -> None:
        # Models first, then the state that names them, then the removal of older files: a kill in between leaves the
        # old state with its files, or the new state with a few files too many.
        number = len(steps)
        name, form = f"part-{number}.onnx", None
        self._write(self.folder / name, model.to_bytes())
        if model.training_form is not None:
            form = f"part-{number}-float.onnx"
            self._write(self.folder / form, model.training_form.to_bytes())
        state = {
            "run": self._fingerprint, "before": asdict(before), "steps": [asdict(step) for step in steps],
            "model": name, "training_form": form,
        }  # fmt: skip
        self._write(self.folder / _STATE, json.dumps(state, indent=1).encode())
        self._clean(f"part-{number}")

    def _clean(self, keep: str) -> None:
        """Remove models of other parts than `keep`, and training checkpoints: they belong to finished parts."""
        for path in [*self.folder.glob("part-*.onnx"), *self.folder.glob("training-*")]:
            # With the character behind the number, or part-1 would keep part-10.
            if not keep or not path.name.startswith((f"{keep}.", f"{keep}-")):
                path.unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        write_durably(path, content, 0o666)
