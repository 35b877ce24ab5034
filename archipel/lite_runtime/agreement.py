"""Bounds of how far `predict` and the training form of a bundle may differ."""

from __future__ import annotations

MIN_AGREEMENT = 0.8
"""Share of equal classes. Int8 with calibration examples like those of devices reaches 0.95 and more."""
MIN_SNR = 10.0
"""dB: noise of a tenth of the power with which answers differ between examples. Int8 reaches 16 dB and more."""
