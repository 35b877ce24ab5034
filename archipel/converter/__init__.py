"""From a trained model to the bundle that devices run."""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.converter.pipeline import convert
from archipel.converter.statistics import Histogram, Mean, Quantiles, Sum

__all__ = ["Histogram", "Mean", "Quantiles", "Sum", "convert"]
