"""Make models small: graph to graph, whichever framework they come from."""

from archipel.compression.compare import Comparison, compare
from archipel.compression.compress import compress
from archipel.compression.compressed import CompressedModel
from archipel.compression.distil import Distil
from archipel.compression.examples import Examples
from archipel.compression.fine_tune import FineTune
from archipel.compression.low_rank import LowRank
from archipel.compression.masks import PruneNM, PruneWeights
from archipel.compression.prune.structured import PruneChannels
from archipel.compression.quantize.aware import QuantizationAware
from archipel.compression.quantize.dynamic import DynamicInt8
from archipel.compression.quantize.half import Float16
from archipel.compression.quantize.static import StaticInt8
from archipel.compression.quantize.weight_only import WeightOnly
from archipel.compression.recipe import load_recipe, parse_recipe, write_recipe
from archipel.compression.report import Measured, Report, Step
from archipel.compression.work import Progress, Work

__all__ = [
    "Comparison",
    "CompressedModel",
    "Distil",
    "DynamicInt8",
    "Examples",
    "FineTune",
    "Float16",
    "LowRank",
    "Measured",
    "Progress",
    "PruneChannels",
    "PruneNM",
    "PruneWeights",
    "QuantizationAware",
    "Report",
    "StaticInt8",
    "Step",
    "WeightOnly",
    "Work",
    "compare",
    "compress",
    "load_recipe",
    "parse_recipe",
    "write_recipe",
]
