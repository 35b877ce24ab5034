"""Gradient rules, one file per operator family. Importing this package fills the registry."""

from archipel.autodiff.rules import activation as activation
from archipel.autodiff.rules import control_flow as control_flow
from archipel.autodiff.rules import conv as conv
from archipel.autodiff.rules import cumulative as cumulative
from archipel.autodiff.rules import einsum as einsum
from archipel.autodiff.rules import elementwise as elementwise
from archipel.autodiff.rules import gather as gather
from archipel.autodiff.rules import group_norm as group_norm
from archipel.autodiff.rules import gru as gru
from archipel.autodiff.rules import image as image
from archipel.autodiff.rules import join as join
from archipel.autodiff.rules import layer_norm as layer_norm
from archipel.autodiff.rules import lstm as lstm
from archipel.autodiff.rules import markers as markers
from archipel.autodiff.rules import matmul as matmul
from archipel.autodiff.rules import normalization as normalization
from archipel.autodiff.rules import pooling as pooling
from archipel.autodiff.rules import quantization as quantization
from archipel.autodiff.rules import random as random
from archipel.autodiff.rules import reduce as reduce
from archipel.autodiff.rules import rnn as rnn
from archipel.autodiff.rules import select as select
from archipel.autodiff.rules import shape as shape
from archipel.autodiff.rules import softmax as softmax
from archipel.autodiff.rules import tangents as tangents
from archipel.autodiff.rules import trigonometric as trigonometric
