"""Search for a recipe that meets a target; see `search`."""

from archipel.compression.search.point import Metrics, Point
from archipel.compression.search.result import SearchResult
from archipel.compression.search.search import SearchProgress, search
from archipel.compression.search.space import Space
from archipel.compression.search.target import Condition, Target, parse_target

__all__ = [
    "Condition",
    "Metrics",
    "Point",
    "SearchProgress",
    "SearchResult",
    "Space",
    "Target",
    "parse_target",
    "search",
]
