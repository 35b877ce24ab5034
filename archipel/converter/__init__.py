"""From a trained model to the bundle that devices run."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.converter.model_files import export
from archipel.converter.opened import open_model
from archipel.converter.options import Analysis, Compression, Signing, Training
from archipel.converter.pipeline import convert
from archipel.converter.statistics import Histogram, Mean, Quantiles, Sum
from archipel.converter.variants import convert_variants, variant_recipes

__all__ = [
    "Analysis",
    "Compression",
    "Histogram",
    "Mean",
    "Quantiles",
    "Signing",
    "Sum",
    "Training",
    "convert",
    "convert_variants",
    "export",
    "open_model",
    "variant_recipes",
]
