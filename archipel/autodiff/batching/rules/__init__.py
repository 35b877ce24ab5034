"""Batching rules, one file per operator family; importing this registers them all."""

from archipel.autodiff.batching.rules import axes as axes
from archipel.autodiff.batching.rules import elementwise as elementwise
from archipel.autodiff.batching.rules import matmul as matmul
from archipel.autodiff.batching.rules import reduce as reduce
from archipel.autodiff.batching.rules import shape as shape
