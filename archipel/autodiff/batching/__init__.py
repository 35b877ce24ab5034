"""`vmap`: a model for many lanes at once."""

from archipel.autodiff.batching import rules as rules  # registers the batching rules
from archipel.autodiff.batching.sweep import Sweep as Sweep
from archipel.autodiff.batching.table import BATCH_RULES as BATCH_RULES
from archipel.autodiff.batching.vmap import vmap as vmap
