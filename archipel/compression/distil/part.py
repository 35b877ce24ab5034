"""Distil: train the model to give a teacher's answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from archipel.compression.compressed import CompressedModel
from archipel.compression.distil.features import Hint, distance, first_projection, hints, inner_values
from archipel.compression.distil.loss import DistillationLoss, class_axis
from archipel.compression.examples import fixed_batch
from archipel.compression.fine_tune import FineTune
from archipel.compression.part import Need
from archipel.compression.score import open_session
from archipel.compression.work import Work
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.functions import inline_functions
from archipel.graph.parameters import record_parameters
from archipel.graph.shapes import dims, dtype_of
from archipel.training.batch_norm import prepared
from archipel.training.step_engines import ONNX_RUNTIME, open_engine

_ANSWER = "teacher/output"
_FEATURE = "teacher/feature_{}"
Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class Distil:
    """Knowledge distillation (Hinton et al. 2015): train on (1 - alpha) loss(labels) + alpha T^2 KL(teacher | student).

    The student is the present model of the recipe: a pruned one learns back what it lost; `compress` of a smaller
    network of any architecture teaches that one. The teacher runs in inference mode on each batch, augmented as for the
    student.

        compress(pruned, [Distil(teacher="large.onnx", fine_tune=FineTune(epochs=3))], data=(images, labels))

    Arguments:
        temperature: T, above 0; alpha: the weight of the teacher's answers, from 0 to 1.
        features: the weight of the mean squared difference of inner values (Romero et al. 2015); 0: none. If channels
            differ in number, or the teacher is another network, a linear map of channels is trained too.
        match: pairs (student's value, teacher's value) to compare; empty: values of the same resolution.
        teacher: an ONNX file with the same inputs and outputs; None: the model that `compress` was given.
        fine_tune: how to train.

    Raises CompressionError for a field out of range; from `apply` for a teacher that does not fit.

    Example:
        better, report = archipel.compress(model, [PruneWeights(0.5), Distil(fine_tune=FineTune(epochs=1))], data=data)
    """

    temperature: float = 4.0
    alpha: float = 0.7
    features: float = 0.0
    match: tuple[tuple[str, str], ...] = ()
    teacher: str | None = None
    fine_tune: FineTune = field(default_factory=FineTune)

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise CompressionError(f"Distil: temperature must be above 0, is {self.temperature!r}")
        if not 0.0 <= self.alpha <= 1.0:
            raise CompressionError(f"Distil: alpha must be from 0 to 1, is {self.alpha!r}")
        if not self.features >= 0.0:
            raise CompressionError(f"Distil: features must be 0 or more, is {self.features!r}")
        if self.alpha == 0.0 and self.features == 0.0:
            raise CompressionError("Distil: with alpha=0 and features=0 there is nothing to learn from the teacher")
        if self.match and not self.features:
            raise CompressionError("Distil: match names features, but features=0 gives them no weight")

    @property
    def needs(self) -> tuple[Need, ...]:
        return ("data",)

    def apply(self, model: CompressedModel, work: Work) -> CompressedModel:
        student = CompressedModel.of(model)
        teacher = self._teacher(work)
        pairs = []
        if self.features:
            pairs = hints(student, teacher, self.match, alike=self.teacher is None)
        renamed = _inputs(student, teacher)
        training, projections = _training_graph(student, teacher, pairs, work.loss, work.seed)
        output = student.ir.graph.outputs[0]
        axis = class_axis(work.loss, len(dims(output)))
        channels = dims(output)[axis]
        loss = DistillationLoss(
            work.loss, self.temperature, self.alpha, self.features, axis, channels if isinstance(channels, int) else 0
        )
        trained = work.train(
            training,
            self.fine_tune,
            loss=loss,
            trainable=(*student.trainable_names, *projections),
            fields=_answers(teacher, renamed, pairs, work.engine),
            what="distillation",
        )
        # Only the student's own parameters: projections stay behind.
        values = trained.parameters
        result = student.with_parameters({name: values[name] for name in student.parameter_names})
        notes: dict[str, Any] = {"features": [[hint.student, hint.teacher] for hint in pairs]}
        if work.validated:
            score = work.evaluate(teacher)
            notes["teacher"] = {"loss": score.loss, "accuracy": score.accuracy}
        work.note(**notes)
        return result

    def _teacher(self, work: Work) -> Model:
        source = work.original if self.teacher is None else Model.from_onnx(self.teacher)
        teacher = prepared(source, "frozen")
        inline_functions(teacher.ir)
        return Model(teacher.ir)


def _inputs(student: Model, teacher: Model) -> dict[str, str]:
    """Student's input -> teacher's input: by name, or else in order."""
    ours, theirs = student.inputs, teacher.inputs
    by_name = {info.name: info for info in theirs}
    pairs = [(info, by_name[info.name]) for info in ours if info.name in by_name]
    if len(pairs) < len(theirs):  # names differ: pair them in order
        pairs = list(zip(ours, theirs))
    fits = len(ours) == len(theirs) and all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a.shape[1:], b.shape[1:]))
        for a, b in pairs
    )
    if not fits:
        raise CompressionError(
            f"Distil: the student takes {_list_inputs(student)}, the teacher {_list_inputs(teacher)}; both must take "
            "the same"
        )
    return {a.name: b.name for a, b in pairs}


def _list_inputs(model: Model) -> str:
    return ", ".join(f"{info.name} {info.dtype}{list(info.shape)}" for info in model.inputs)


def _training_graph(
    student: CompressedModel, teacher: Model, pairs: list[Hint], loss: Any, seed: int
) -> tuple[CompressedModel, list[str]]:
    """The student with the teacher's answers as inputs and all parts of the loss as output; names of projections."""
    result = CompressedModel(student.ir.clone())
    graph = result.ir.graph
    parameters = list(result.parameter_names)
    op = Builder(graph, scope="distil")
    output, answer = graph.outputs[0], teacher.ir.graph.outputs[0]
    axis = class_axis(loss, len(dims(output))) if len(dims(output)) > 1 else 1
    sizes, answer_sizes = dims(output)[1:], dims(answer)[1:]
    differ = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in zip(sizes, answer_sizes))
    if not sizes or len(sizes) != len(answer_sizes) or differ or not isinstance(dims(output)[axis], int):
        raise CompressionError(
            f"Distil: the student's output {output.name!r} is {list(dims(output))}, the teacher's {answer.name!r} "
            f"{list(dims(answer))}; both need the same sizes behind the batch, and a fixed one along axis {axis}"
        )
    batch = dims(output)[0]
    parts = [output, op.input(_ANSWER, dtype_of(answer), [_size(d, i) for i, d in enumerate(dims(output))])]
    projections: list[str] = []
    distances = []
    inner, theirs = inner_values(result), inner_values(teacher)
    rng = np.random.default_rng(seed)
    for number, hint in enumerate(pairs):
        ours, other = inner[hint.student], theirs[hint.teacher]
        shape = [_size(batch, 0), *(int(d) for d in dims(other)[1:] if isinstance(d, int))]
        feature = op.input(_FEATURE.format(number), dtype_of(other), shape)
        weight = None
        if hint.project:
            weight = op.initializer(f"{hint.student}.projection", first_projection(hint, ours, other, rng))
            projections.append(str(weight.name))
        distances.append(distance(op, hint, ours, feature, weight))
    if distances:
        mean = op.Mul(op.Sum(*distances), 1.0 / len(distances))
        spread = op.Unsqueeze(mean, list(range(1, len(dims(output)))))
        # One distance for each example, repeated over all positions but the channels: the shape that Concat needs.
        like = op.ReduceMean(output, [axis], keepdims=1)
        parts.append(op.Expand(spread, op.Shape(like)))
    joined = op.Concat(*parts, axis=axis)
    # The training loop allows one output, so all parts of the loss are joined along the axis of the classes.
    graph.outputs.clear()
    op.name_output(joined, "distillation")
    record_parameters(result.ir, [*parameters, *projections])
    return result, projections


def _size(size: int | str | None, place: int) -> int | str:
    return f"teacher_dim{place}" if size is None else size


def _open(teacher: Model, outputs: list[str], engine: str) -> Callable[[Fields], list[np.ndarray]]:
    if engine == ONNX_RUNTIME:
        # One thread: a second thread pool would spin on the cores where the student trains.
        return open_session(teacher, threads=1, outputs=outputs)
    opened = open_engine(teacher, engine)
    return lambda feed: opened.run(outputs, feed, kept=())


def _answers(teacher: Model, renamed: dict[str, str], pairs: list[Hint], engine: str) -> Callable[[Fields], Fields]:
    """A function that adds the teacher's answers to a batch."""
    graph = teacher.ir.graph
    answer = str(graph.outputs[0].name)
    op = Builder(graph)
    inner = inner_values(teacher)
    names = list(dict.fromkeys(hint.teacher for hint in pairs))
    outputs = {name: str(op.name_output(op.Identity(inner[name]), f"{name}/read").name) for name in names}
    run = _open(teacher, [answer, *outputs.values()], engine)
    most = fixed_batch(teacher)

    def ask(batch: Fields) -> Fields:
        feed = {theirs: batch[ours] for ours, theirs in renamed.items()}
        count = len(next(iter(feed.values())))
        size = most or count
        if count % size:
            raise CompressionError(f"Distil: the teacher takes {size} examples at a time, the batch has {count}")
        pieces = [run({n: array[at : at + size] for n, array in feed.items()}) for at in range(0, count, size)]
        results = [np.concatenate(each) for each in zip(*pieces)]
        features = dict(zip(names, results[1:]))
        return {
            **batch,
            _ANSWER: results[0],
            **{_FEATURE.format(number): features[hint.teacher] for number, hint in enumerate(pairs)},
        }

    return ask
