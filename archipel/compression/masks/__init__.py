"""Masks: weights are set to zero, and a product in the graph keeps them there during training."""

from archipel.compression.masks.apply import write_masks as write_masks
from archipel.compression.masks.n_of_m import PruneNM as PruneNM
from archipel.compression.masks.unstructured import PruneWeights as PruneWeights

__all__ = ["PruneNM", "PruneWeights", "write_masks"]
