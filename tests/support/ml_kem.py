"""The second implementation of ML-KEM-768, that of the vectors."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from protocol_vectors import ml_kem

__all__ = ["ml_kem"]
