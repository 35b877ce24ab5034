"""The tables of robust rules and of mixers. To add one: write NAME.py, add it here and its name to the protocol's."""

from __future__ import annotations

from archipel.strategies.robust import (
    centered_clipping,
    fltrust,
    geometric_median,
    krum,
    median,
    mixing,
    norm_bounding,
    trimmed_mean,
)
from archipel.strategies.robust.rule import Mixer, Rule

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(median.RULE, trimmed_mean.RULE, krum.KRUM, krum.MULTI_KRUM, geometric_median.RULE),
        *(centered_clipping.RULE, norm_bounding.RULE, fltrust.RULE),
    )
}

MIXERS: dict[str, Mixer] = {mixer.name: mixer for mixer in (mixing.NEAREST, mixing.BUCKETS)}
