"""Small reference networks, one file each. PyTorch is imported when a network is made."""

from __future__ import annotations

from archipel.models.digits_cnn import digits_cnn

__all__ = ["digits_cnn"]
