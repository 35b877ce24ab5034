"""Weights set to zero and kept there: a mask in the graph that training goes through."""

from archipel.compression.masks.apply import write_masks as write_masks
from archipel.compression.masks.n_of_m import PruneNM as PruneNM
from archipel.compression.masks.unstructured import PruneWeights as PruneWeights

__all__ = ["PruneNM", "PruneWeights", "write_masks"]
