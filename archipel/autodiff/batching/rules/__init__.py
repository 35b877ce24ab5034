"""Batching rules, one file per operator family; importing this registers them all."""

from archipel.autodiff.batching.rules import axes as axes
from archipel.autodiff.batching.rules import control_flow as control_flow
from archipel.autodiff.batching.rules import conv as conv
from archipel.autodiff.batching.rules import einsum as einsum
from archipel.autodiff.batching.rules import elementwise as elementwise
from archipel.autodiff.batching.rules import gather as gather
from archipel.autodiff.batching.rules import join as join
from archipel.autodiff.batching.rules import loss as loss
from archipel.autodiff.batching.rules import markers as markers
from archipel.autodiff.batching.rules import matmul as matmul
from archipel.autodiff.batching.rules import normalization as normalization
from archipel.autodiff.batching.rules import quantization as quantization
from archipel.autodiff.batching.rules import recurrent as recurrent
from archipel.autodiff.batching.rules import reduce as reduce
from archipel.autodiff.batching.rules import shape as shape
from archipel.autodiff.batching.rules import spatial as spatial
