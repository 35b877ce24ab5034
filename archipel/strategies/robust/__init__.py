"""Rules that aggregate updates of which some are arbitrary, one file each, and what mixes updates before a rule."""

from archipel.protocol.operator.aggregation import Aggregation
from archipel.strategies.robust.registry import MIXERS, RULES
from archipel.strategies.robust.rule import Mixer, Rule

__all__ = ["MIXERS", "RULES", "Aggregation", "Mixer", "Rule"]
