"""Gradient rules, one file per operator family. Importing this package fills the registry."""

from archipel.autodiff.rules import activation as activation
from archipel.autodiff.rules import conv as conv
from archipel.autodiff.rules import elementwise as elementwise
from archipel.autodiff.rules import gather as gather
from archipel.autodiff.rules import matmul as matmul
from archipel.autodiff.rules import pooling as pooling
from archipel.autodiff.rules import reduce as reduce
from archipel.autodiff.rules import select as select
from archipel.autodiff.rules import shape as shape
from archipel.autodiff.rules import softmax as softmax
