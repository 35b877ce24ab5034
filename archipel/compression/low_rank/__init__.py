"""Layers as products of two thinner ones."""

from archipel.compression.low_rank.part import LowRank as LowRank

__all__ = ["LowRank"]
