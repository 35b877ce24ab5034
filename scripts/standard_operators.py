"""Write archipel/bundle/graphs/operators.py and web/src/bundle/graphs/operators.ts: the operators that bundles may use.

Those of the internal opset that ONNX Runtime's CPU build has a kernel for, and those that ONNX defines by a function
body, which ONNX Runtime inlines. Both are asked of the installed packages; nothing is typed in by hand.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from onnx import defs
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

from archipel.graph.opset import IR_VERSION, OPSET

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "archipel" / "bundle" / "graphs" / "operators.py"
TYPESCRIPT = ROOT / "web" / "src" / "bundle" / "graphs" / "operators.ts"
_WIDTH = 116
_TITLE = "The standard operators that a bundle's graphs may use. Written by `python scripts/standard_operators.py`"


def standard_operators() -> list[str]:
    """Names, sorted."""
    kernels: dict[str, list[tuple[int, int]]] = {}
    for kernel in get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider" and kernel.domain == "":
            kernels.setdefault(kernel.op_name, []).append(kernel.version_range)
    found = ["Constant"]  # which has no kernel: it becomes an initializer
    for name in {schema.name for schema in defs.get_all_schemas() if schema.domain == ""}:
        try:
            schema = defs.get_schema(name, OPSET, "")
        except defs.SchemaError:
            continue  # newer than the internal opset
        body = schema.has_function or schema.has_context_dependent_function
        runs = any(first <= schema.since_version <= last for first, last in kernels.get(name, ()))
        if not schema.deprecated and (runs or body) and name not in found:
            found.append(name)
    return sorted(found)


def python(names: list[str]) -> str:
    words = textwrap.fill(" ".join(names), _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return (
        f'"""{_TITLE}.\n\n'
        f"Those of opset {OPSET} with a kernel in ONNX Runtime's CPU build, or with a function body in ONNX.\n"
        '"""\n\n'
        f"OPSET = {OPSET}\nIR_VERSION = {IR_VERSION}\n\n"
        f'OPERATORS = frozenset(\n    """\n{words}\n    """.split()  # noqa: SIM905\n)\n'
    )


def typescript(names: list[str]) -> str:
    words = textwrap.fill(" ".join(names), _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return (
        f"/**\n * {_TITLE}.\n *\n"
        f" * Those of opset {OPSET} with a kernel in ONNX Runtime's CPU build, or with a function body in ONNX.\n"
        " */\n\n"
        f"export const OPSET = {OPSET};\nexport const IR_VERSION = {IR_VERSION};\n\n"
        f"export const OPERATORS: ReadonlySet<string> = new Set(\n  `\n{words}\n  `.trim().split(/\\s+/),\n);\n"
    )


def main() -> None:
    names = standard_operators()
    TYPESCRIPT.parent.mkdir(parents=True, exist_ok=True)
    PYTHON.write_text(python(names))
    TYPESCRIPT.write_text(typescript(names))
    print(f"{len(names)} operators in {PYTHON.relative_to(ROOT)} and {TYPESCRIPT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
