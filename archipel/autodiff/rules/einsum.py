"""Einstein sums. The gradient of each operand is an Einstein sum of the cotangent and the other operands."""

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
"""Of an axis: a letter of the equation; for an axis of an ellipsis its position counted from the end, -1 the last."""

Factor = tuple[ir.Value, list[Label], Sequence[Dim]]
"""An operand, the labels of its axes, and their sizes."""


@rule("", "Einsum")
def einsum(ctx: RuleContext) -> Gradients:
    """Y = sum of products of operands: dX is the cotangent times the other operands, summed over what X lacks.

    Every equation of ONNX Einsum-12: implicit output, ellipses, a label twice in one operand (a diagonal), labels of
    one operand only that are summed, sizes of 1 that broadcast.
    """
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
    # Without an arrow the output has the ellipsis, then the letters that occur once, sorted.
    count = Counter(label for term in terms for label in term)
    once = sorted(label for label, times in count.items() if isinstance(label, str) and times == 1)
    return terms, [*range(-widest, 0), *once]


def _labels(term: str, covered: int) -> list[Label]:
    before, dots, after = term.partition("...")
    return [*before, *(range(-covered, 0) if dots else ()), *after]


def _size(label: Label, factors: Sequence[Factor]) -> Dim:
    """The size that this label's axes broadcast to; None if it is not known, 1 if no axis has the label."""
    known = {size for _, labels, sizes in factors for name, size in zip(labels, sizes) if name == label} - {1}
    fixed = [size for size in known if isinstance(size, int)]
    if fixed:
        return fixed[0]
    return known.pop() if len(known) == 1 else None if known else 1


def _gradient(ctx: RuleContext, operand: Factor, factors: list[Factor]) -> ir.Value:
    """The cotangent times all other operands, summed to the labels of this one and repeated where it was summed."""
    op, (x, labels, own) = ctx.op, operand
    target: list[Label] = []
    for axis, label in enumerate(labels):
        if label in target:
            # The operand's diagonal was read, so off it the gradient is 0: the second axis gets a label of its own and
            # an identity matrix as a factor that joins it with the first.
            twin = f"{label}{axis}"
            factors = [*factors, (_identity(op, x, axis), [label, twin], [own[axis]] * 2)]
            label = twin
        target.append(label)
    # Not in the product: axes that no other factor has (summed in X, so the gradient is constant along them), and axes
    # of size 1 that were broadcast (they are summed over). Both come back with size 1; Expand repeats the first kind.
    present = {label for _, names, _ in factors for label in names}
    kept = [label for label, size in zip(target, own) if label in present and (size != 1 or _size(label, factors) == 1)]
    result = _product(ctx, factors, kept)
    missing = [axis for axis, label in enumerate(target) if label not in kept]
    if missing:
        result = op.Unsqueeze(result, missing)
    sizes = {label: _size(label, factors) for label in kept}
    # The shape of the result, for `sum_to`. A letter has the operand's own size unless it is 1 here: only axes of an
    # ellipsis may broadcast.
    shape = [
        size if isinstance(label, str) and sizes.get(label, 1) != 1 else sizes.get(label, 1)
        for label, size in zip(target, own)
    ]
    if not same_shape(shape, own):
        result = op.Expand(result, op.shape_of(x))
        shape = [_size("", [(result, [""], [have]), (x, [""], [want])]) for have, want in zip(shape, own)]
    result.shape = ir.Shape(shape)
    return op.sum_to(result, x)


def _product(ctx: RuleContext, factors: Sequence[Factor], output: list[Label]) -> ir.Value:
    """The Einsum of the factors with this output; labels of any kind become letters."""
    if len(factors) == 1 and factors[0][1] == output:
        return ctx.op.Identity(factors[0][0])
    names = list(dict.fromkeys(label for _, labels, _ in factors for label in labels))
    if len(names) > len(ascii_letters):
        ctx.refuse("equation", f"its gradient has {len(names)} labels, there are {len(ascii_letters)} letters")
    letters = dict(zip(names, ascii_letters))
    terms = ["".join(letters[label] for label in labels) for labels in (*(labels for _, labels, _ in factors), output)]
    return ctx.op.Einsum(*(value for value, _, _ in factors), equation=",".join(terms[:-1]) + "->" + terms[-1])


def _identity(op: Builder, x: ir.Value, axis: int) -> ir.Value:
    """The identity matrix of the size of one axis of `x`, in its type."""
    size = dims(x)[axis]
    length = op.Shape(x, start=axis, end=axis + 1)
    shape = op.constant([size, size]) if isinstance(size, int) else op.Concat(length, length, axis=0)
    return op.EyeLike(zeros(op, shape, x))
