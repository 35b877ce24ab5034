"""Models straight from Python functions: reads a function's syntax tree and writes one graph with real If and Loop.

onnxscript's converter (`@script`) reads functions over ONNX's own operators. It has no NumPy names, no types, shapes or
promotion, takes `break` only as the last statement of a loop and `return` only at the end, and offers its parts under
private names only. So this package reads the tree itself, and writes with the Builder, which infers each node's type
and shape at once: rules for promotion, for `x.shape` and for what a loop carries need those.
"""

from archipel.graph import requirement as requirement  # isort: skip  (first: it names the missing extra)
from archipel.frontend import calls as calls  # fills the tables of syntax and of NumPy's functions
from archipel.frontend import conditions as conditions
from archipel.frontend import expressions as expressions
from archipel.frontend import loops as loops
from archipel.frontend import numpy_functions as numpy_functions
from archipel.frontend.api import function as function

__all__ = ["function"]
