"""Einstein sums: the gradient of each operand is one, too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from string import ascii_letters

import onnx_ir as ir

from archipel.autodiff.context import RuleContext
from archipel.autodiff.registry import Gradients, rule
from archipel.autodiff.rules.join import zeros
from archipel.graph.build import Builder
from archipel.graph.shapes import Dim, dims, rank, same_shape

Label = str | int
"""Of an axis: a letter of the equation; for those of an ellipsis the place counted from its end, -1 the last."""

Factor = tuple[ir.Value, list[Label], Sequence[Dim]]
"""An operand, the labels and the sizes of its axes."""


@rule("", "Einsum")
def einsum(ctx: RuleContext) -> Gradients:
    """Every equation of ONNX Einsum-12: implicit output, ellipses, a label twice in one operand, labels of one operand
    that are summed, sizes of 1 that are repeated."""
    values = [ctx.input(i) for i in range(len(ctx.inputs))]
    terms, output = _parse(ctx.attribute("equation", ""), [rank(value) for value in values])
    operands = [(value, term, dims(value)) for value, term in zip(values, terms)]
    cotangent = (ctx.cotangent, output, [_size(label, operands) for label in output])
    return [
        _gradient(ctx, operand, [cotangent, *operands[:i], *operands[i + 1 :]]) if ctx.wants(i) else None
        for i, operand in enumerate(operands)
    ]


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[list[Label]], list[Label]]:
    """Labels of the operands' axes, and of the output's."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_labels(term, n - len(term.replace("...", ""))) for term, n in zip(left.split(","), ranks)]
    widest = max(sum(isinstance(label, int) for label in term) for term in terms)
    if arrow:
        return terms, _labels(right, widest)
    count = Counter(label for term in terms for label in term)
    once = sorted(label for label, times in count.items() if isinstance(label, str) and times == 1)
    return terms, [*range(-widest, 0), *once]


def _labels(term: str, covered: int) -> list[Label]:
    before, dots, after = term.partition("...")
    return [*before, *(range(-covered, 0) if dots else ()), *after]


def _size(label: Label, factors: Sequence[Factor]) -> Dim:
    """What the sizes of this label's axes broadcast to; None if that is not known, 1 if there is no such axis."""
    found = {size for _, labels, sizes in factors for name, size in zip(labels, sizes) if name == label} - {1}
    fixed = [size for size in found if isinstance(size, int)]
    if fixed:
        return fixed[0]
    return found.pop() if len(found) == 1 else None if found else 1


def _gradient(ctx: RuleContext, operand: Factor, factors: list[Factor]) -> ir.Value:
    """The cotangent times all other operands, summed to the labels of this one and repeated where it was summed."""
    op, (x, labels, own) = ctx.op, operand
    target: list[Label] = []
    for axis, label in enumerate(labels):
        if label in target:
            # Off the diagonal the gradient is zero: a label of its own, tied to the first by an identity matrix.
            twin = f"{label}{axis}"
            factors = [*factors, (_identity(op, x, axis), [label, twin], [own[axis]] * 2)]
            label = twin
        target.append(label)
    present = {label for _, names, _ in factors for label in names}
    kept = [label for label, size in zip(target, own) if label in present and (size != 1 or _size(label, factors) == 1)]
    found = _product(ctx, factors, kept)
    missing = [axis for axis, label in enumerate(target) if label not in kept]
    if missing:
        found = op.Unsqueeze(found, missing)
    sizes = {label: _size(label, factors) for label in kept}
    # Only what an ellipsis covers broadcasts; a letter has one size, where it does not show otherwise.
    shape = [
        size if isinstance(label, str) and sizes.get(label, 1) != 1 else sizes.get(label, 1)
        for label, size in zip(target, own)
    ]
    if not same_shape(shape, own):
        found = op.Expand(found, op.shape_of(x))
        shape = [_size("", [(found, [""], [have]), (x, [""], [want])]) for have, want in zip(shape, own)]
    found.shape = ir.Shape(shape)
    return op.sum_to(found, x)


def _product(ctx: RuleContext, factors: Sequence[Factor], output: list[Label]) -> ir.Value:
    if len(factors) == 1 and factors[0][1] == output:
        return ctx.op.Identity(factors[0][0])
    names = list(dict.fromkeys(label for _, labels, _ in factors for label in labels))
    if len(names) > len(ascii_letters):
        ctx.refuse("equation", f"its gradient has {len(names)} labels, there are {len(ascii_letters)} letters")
    letters = dict(zip(names, ascii_letters))
    terms = ["".join(letters[label] for label in labels) for labels in (*(labels for _, labels, _ in factors), output)]
    return ctx.op.Einsum(*(value for value, _, _ in factors), equation=",".join(terms[:-1]) + "->" + terms[-1])


def _identity(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    size = dims(x)[axis]
    once = op.Shape(x, start=axis, end=axis + 1)
    shape = op.constant([size, size]) if isinstance(size, int) else op.Concat(once, once, axis=0)
    return op.EyeLike(zeros(op, shape, x))
