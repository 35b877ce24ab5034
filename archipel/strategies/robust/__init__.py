"""Rules that aggregate updates of which some are arbitrary, one file each, and what mixes updates before a rule."""

from archipel.strategies.robust.registry import MIXERS, RULES, Aggregation
from archipel.strategies.robust.rule import Mixer, Rule

__all__ = ["MIXERS", "RULES", "Aggregation", "Mixer", "Rule"]
