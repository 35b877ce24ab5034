"""What each ONNX operator is in PyTorch: one file for each family, as in `autodiff/rules/`. Needs PyTorch."""

from archipel.training.cloud.ops import activation as activation
from archipel.training.cloud.ops import clip as clip
from archipel.training.cloud.ops import control_flow as control_flow
from archipel.training.cloud.ops import dropout as dropout
from archipel.training.cloud.ops import elementwise as elementwise
from archipel.training.cloud.ops import gather as gather
from archipel.training.cloud.ops import generating as generating
from archipel.training.cloud.ops import gradients as gradients
from archipel.training.cloud.ops import loss as loss
from archipel.training.cloud.ops import markers as markers
from archipel.training.cloud.ops import matmul as matmul
from archipel.training.cloud.ops import normalization as normalization
from archipel.training.cloud.ops import quantized as quantized
from archipel.training.cloud.ops import recurrent as recurrent
from archipel.training.cloud.ops import reduce as reduce
from archipel.training.cloud.ops import scatter as scatter
from archipel.training.cloud.ops import selection as selection
from archipel.training.cloud.ops import shape as shape
from archipel.training.cloud.ops import spatial as spatial
from archipel.training.cloud.ops import spectrum as spectrum
from archipel.training.cloud.ops.context import NodeContext as NodeContext
from archipel.training.cloud.ops.table import LOWERINGS as LOWERINGS
from archipel.training.cloud.ops.table import find_lowering as find_lowering
from archipel.training.cloud.ops.table import lowering as lowering

__all__ = ["LOWERINGS", "NodeContext", "find_lowering", "lowering"]
