"""A small model learns from what a large one answers, and from what it sees on the way."""

from archipel.compression.distil.part import Distil as Distil

__all__ = ["Distil"]
