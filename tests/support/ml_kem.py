"""The second implementation of ML-KEM-768, that of the vectors."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
ml_kem: ModuleType = importlib.import_module("protocol_vectors.ml_kem")
