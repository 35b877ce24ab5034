from __future__ import annotations

import torch
from gradient_cases.case import Array, Case, Draw, free_axes, normal
from hypothesis import strategies as st

KNOWN = ["ij,jk->ik", "bij,bjk", "bhqd,bhkd->bhqk", "ii", "ii->i", "i,j->ij", "ij->", "i,i", "ij,kj,kl->il", ",ij->ji"]


@st.composite
def einsum(draw: Draw) -> Case:
    sizes = {letter: draw(st.integers(1, 3)) for letter in "ijkAB"}
    dots = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    broadcast = draw(st.booleans())
    terms, arrays = [], []
    for _ in range(draw(st.sampled_from([1, 2, 2, 3]))):
        labels = draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3))
        shape = [sizes[letter] for letter in labels]
        place = draw(st.integers(0, len(labels))) if draw(st.booleans()) else None
        if place is not None:
            # Only these axes broadcast: of a letter's, ONNX's inference believes the first size.
            shape[place:place] = [draw(st.sampled_from([1, size, size])) if broadcast else size for size in dots]
            labels.insert(place, "...")
        terms.append("".join(labels))
        arrays.append(normal(draw, *shape))
    used = sorted({letter for term in terms for letter in term.replace(".", "")})
    equation = draw(st.sampled_from([",", " , "])).join(terms)
    # ONNX Runtime refuses capitals in an implicit output, and an ellipsis that is summed.
    if draw(st.booleans()) or any(letter.isupper() for letter in used):
        out = draw(st.permutations(used))[: draw(st.integers(0, len(used)))]
        if any("..." in term for term in terms):
            out.insert(draw(st.integers(0, len(out))), "...")
        equation += draw(st.sampled_from(["->", " -> "])) + "".join(out)
    case = _case(draw, equation or "->", arrays)
    if broadcast:
        case.free.clear()  # and a size of 1 rather than a symbolic one
    return case


@st.composite
def familiar(draw: Draw) -> Case:
    equation = draw(st.sampled_from(KNOWN))
    sizes = {letter: draw(st.integers(1, 3)) for letter in set(equation) if letter.isalpha()}
    arrays = [normal(draw, *(sizes[letter] for letter in term)) for term in equation.partition("->")[0].split(",")]
    return _case(draw, equation, arrays)


def _case(draw: Draw, equation: str, arrays: list[Array]) -> Case:
    return Case(
        "Einsum",
        arrays,
        {"equation": equation},
        constants=frozenset(draw(st.sampled_from([[], [], range(1, len(arrays))]))),
        free={i: free_axes(draw, array.shape) for i, array in enumerate(arrays)},
        torch=lambda *x: torch.einsum(equation, *(torch.as_tensor(value) for value in x)),
    )


CASES = {("", "Einsum"): st.one_of(einsum(), einsum(), familiar())}
