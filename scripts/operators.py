"""Write docs/operators.md: what the ONNX package's node tests say about the gradient of each operator."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "operators"), str(TESTS / "autodiff")]

from coverage_table import KNOWN, PAGE, page, results  # noqa: E402
from sequence_cases import sequence_results  # noqa: E402


def main() -> int:
    found = results()
    PAGE.write_text(page(found, sequence_results()))
    wrong = [result for result in found if result.status == "failed" and result.name not in KNOWN]
    for result in wrong:
        print(f"{result.name}: {result.reason}")
    print(f"{PAGE}: {len(found)} cases, {len(wrong)} unexpectedly wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
