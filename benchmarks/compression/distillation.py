"""A small student trained alone and with a float model as its teacher: same start, same steps, same order of data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from cells import Cells
from evaluation import Difference, accuracy, difference
from made import Facts, float_facts, onnx_facts, run_recipe
from recipe_files import recipe_text
from subjects import Subject
from verdict import Outcome, at_least

from archipel import Model

TEACHER = "cifar-resnet8"
SEEDS = (0, 1, 2)
WAYS = ("student_alone", "student_distilled")
GOAL = 1.0


@dataclass(frozen=True)
class Distillation:
    """Test accuracies in percent, means over seeds; `lift` is distilled - alone. FLOPs and bytes: teacher, student."""

    teacher: str
    seeds: tuple[int, ...]
    of_teacher: float
    alone: float
    distilled: float
    lift: Difference
    validation_lift: float
    flops: tuple[int, int]
    nbytes: tuple[int, int]
    recipes: tuple[str, ...]

    @property
    def reached(self) -> Outcome:
        return at_least(GOAL, self.lift.low, self.lift.high)


def distillation(teacher: Subject, cells: Cells) -> Distillation:
    """Train the students, or read what was trained before. `teacher` is one float model."""
    count = len(teacher.test)
    found = {way: [_student(teacher, way, seed, cells) for seed in SEEDS] for way in WAYS}
    alone, distilled = (found[way] for way in WAYS)
    above = float_facts(teacher, cells)
    return Distillation(
        teacher.title,
        SEEDS,
        accuracy(above["correct"], count),
        float(np.mean([accuracy(each["correct"], count) for each in alone])),
        float(np.mean([accuracy(each["correct"], count) for each in distilled])),
        difference([(a["correct"], b["correct"]) for a, b in zip(alone, distilled)], count),
        float(np.mean([b["validation"][1] - a["validation"][1] for a, b in zip(alone, distilled)])),
        (above["flops"], alone[0]["flops"]),
        (above["bytes"], alone[0]["bytes"]),
        tuple(recipe_text(way, teacher.name) for way in WAYS),
    )


def _student(teacher: Subject, way: str, seed: int, cells: Cells) -> Facts:
    text = recipe_text(way, teacher.name)
    key = {"teacher": teacher.digest, "recipe": text, "seed": seed}
    return cells.get(f"{teacher.title} {way} {seed}", key, partial(_trained, teacher, way, text, seed))


def _trained(teacher: Subject, way: str, text: str, seed: int) -> Facts:
    start = Model.from_torch(teacher.case.network(seed).eval(), teacher.test.inputs[:2].copy())
    student, found = run_recipe(teacher, start, text.replace("TEACHER", str(teacher.path)), seed)
    path = teacher.made / f"{way}-{seed}.onnx"
    student.save(path)
    return {**onnx_facts(teacher, path), **found}
