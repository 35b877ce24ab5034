"""Importing this module puts the other benchmarks' folder on the path: timing, peers."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ROOT = BENCHMARKS.parent

if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))
