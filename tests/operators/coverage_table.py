"""docs/operators.md: what the results of the backend cases say about each operator."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from backend_cases import CONSTANTS, Result, check, qualifying
from engines_table import engines_part

from archipel.autodiff import RULES
from archipel.autodiff.registry import source_file
from archipel.graph.opset import OPSET
from archipel.training.cloud.ops import LOWERINGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operators.md"
HEAD = f"""# Operators and their gradients

Written by `python scripts/operators.py`, from the node tests that the ONNX package brings along (onnx
{onnx.__version__}): those of one standard operator with floating-point inputs and outputs. Each is imported,
differentiated, and a random projection of its outputs compared with central finite differences on `onnx.reference`, in
float64 where the operator has it (relative error below 1e-5; below 2e-2 in float32). The contract test of the rules
(`tests/autodiff/test_rules.py`) draws more than these cases: every attribute, symbolic sizes, PyTorch, ONNX Runtime.

- **rule**: its file in `archipel/autodiff/rules/`. *body*: opset {OPSET} lacks the operator, or it has no rule of its
  own; it is imported as the operators of its function body, and these have rules.
  *none*: it has none, and the cases are refused by name.
- **passed**: `12 (3)` means that three of the twelve need their integer inputs (axes, shapes, indices) as constants.
- **PyTorch**: the file in `archipel/training/cloud/ops/` that says what the operator is in PyTorch, for training in the
  cloud; tests compare its values and gradients with those here. *body* as above; *none*: PyTorch does not run it.
- **again**: whether the gradient of each case that passed can itself be differentiated, and that comes out right.

A model with an operator that has no rule can still be imported, run, and trained where no gradient passes through it.

| operator | rule | PyTorch | cases | passed | refused, and why | again |
|---|---|---|---:|---:|---|---|
"""

SEQUENCES = """
## Control flow, sequences and optionals

The inputs and outputs of a model are tensors; an import refuses others by name. Inside a graph sequences and optionals
are allowed: the package's tests of them, with sequences made of tensors and taken apart again, are imported, checked as
a device checks a graph, and run in ONNX Runtime. `right` counts those that give what the package declares. Gradients
pass through If, Loop and Scan (above), not through sequences and optionals.

| operator | cases | right | refused, and why |
|---|---:|---:|---|
"""

# What is known not to be right yet, by the case's name; the table shows it.
KNOWN = dict.fromkeys(
    (
        "test_attention_causal_boolmask_nan_robustness",
        "test_attention_23_boolmask_fullymasked_row_nan_robustness",
        "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
        "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_fullymasked_qk_matmul_output_mode3_zero",
        "test_attention_24_qk_matmul_output_mode3_softmax_precision",
        "test_attention_local_window_gqa_rank4_mask",
    ),
    "wrong: NaN where a row is masked as a whole",
)


@cache
def results(per_operator: int = sys.maxsize) -> tuple[Result, ...]:
    """What became of each case, or of so many for each operator; computed once."""
    seen: Counter[str] = Counter()
    found = []
    for case in qualifying():
        op_type = case.model.graph.node[0].op_type
        if seen[op_type] < per_operator:
            found.append(check(case))
        seen[op_type] += 1
    return tuple(found)


def rules() -> dict[str, str]:
    """Standard operators with a rule -> its file."""
    return {op_type: Path(source_file(rule)).name for (domain, op_type), rule in RULES.items() if domain == ""}


def lowering_of(op_type: str) -> str | None:
    """The file of the operator's lowering to PyTorch, if it has one."""
    function: Any = LOWERINGS.get(("", op_type))
    if function is None:
        return None
    module = str(getattr(function, "func", function).__module__)  # a partial's own function
    return module.removeprefix("archipel.training.cloud.ops.").replace(".", "/") + ".py"


def page(found: Iterable[Result], sequences: Iterable[Result]) -> str:
    """The whole page, of the cases with gradients and of those with control flow, sequences and optionals."""
    by_operator: dict[str, list[Result]] = defaultdict(list)
    for result in found:
        by_operator[result.op_type].append(result)
    files = rules()
    gradients = "".join(_row(op, files.get(op), by_operator[op]) for op in sorted({*by_operator, *files}))
    by_family: dict[str, list[Result]] = defaultdict(list)
    for result in sequences:
        by_family[result.op_type].append(result)
    families = "".join(_short_row(op, by_family[op]) for op in sorted(by_family))
    return HEAD + gradients + SEQUENCES + families + engines_part()


def _short_row(op_type: str, found: list[Result]) -> str:
    reasons = Counter(_reason(result.reason) for result in found if result.status != "passed")
    right = sum(result.status == "passed" for result in found)
    refused = "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items()))
    return f"| {op_type} | {len(found)} | {right} | {refused} |\n"


def _row(op_type: str, rule: str | None, found: list[Result]) -> str:
    passed = [result for result in found if result.status == "passed"]
    fixed = sum(result.reason == CONSTANTS for result in passed)
    reasons = Counter(KNOWN.get(r.name) or _reason(r.reason) for r in found if r.status != "passed")
    if set(reasons) == {f"no gradient rule for {op_type}"}:
        reasons, rule = Counter(), "*none*"
    elif not rule and not passed:
        rule = "*none*"
    again = sorted({_reason(result.second) for result in passed if result.second})
    cells = (
        op_type,
        rule or "*body*",
        lowering_of(op_type) or ("*none*" if rule else "*body*"),
        str(len(found)),
        f"{len(passed)} ({fixed})" if fixed else str(len(passed)),
        "; ".join(f"{count}: {reason}" for reason, count in sorted(reasons.items())),
        ("yes" if not again else f"no: {'; '.join(again)}") if passed else "",
    )
    return f"| {' | '.join(cells)} |\n"


def _reason(text: str) -> str:
    """An error's reason without names and remedy."""
    if "SequenceAt" in text and "differ in rank" in text:
        return "its items have several ranks, and inference takes them for scalars"
    if "existing shape differ" in text:
        return "declares another output size than opset 21 gives"
    text = re.sub(r"the shape of .* is not known", "the shape of an inner value is not known", text)
    text = re.split(
        r"; (?:add one to|the rule is in|export the|export it|use one of|use |leave )|, which .* does not take", text
    )[0]
    text = re.sub(r"^no gradient rule for (\w+) .*", r"no gradient rule for \1", text)
    return re.sub(r"^\w+ '[^']*'(?: \(opset \d+\))?:? ?", "", re.sub(r"'[^']*' is ", "", text)).replace("|", "/")
