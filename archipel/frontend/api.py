"""`function`: a Python function to a model."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from archipel.errors import FunctionError, GraphError
from archipel.frontend.calls import outer_names, read
from archipel.frontend.emit import Emitter
from archipel.frontend.reader import Reader
from archipel.frontend.source import definition_of
from archipel.frontend.values import DTYPES, PYTHON_TYPES, Tensor, UnsupportedError, is_numeric, python_type, refuse
from archipel.graph.batch import BATCH
from archipel.graph.build import Builder
from archipel.graph.model import Model
from archipel.graph.opset import IR_VERSION, OPSET
from archipel.graph.passes import remove_identities, share_subexpressions, simplify
from archipel.graph.report import ImportReport
from archipel.graph.shapes import dims
from archipel.library_errors import one_line

Symbolic = Mapping[str, Mapping[int, str] | Sequence[str | None]]
"""Parameter -> names of sizes: by axis ({0: "batch"}), or one for each axis (["batch", None])."""


def function(
    python_function: Callable[..., Any],
    example_args: Any,
    *,
    symbolic: Symbolic | None = None,
    dynamic_batch: bool = False,
) -> Model:
    """Read a Python function over NumPy arrays and give the model that computes the same.

    The function's syntax tree is read; it is not run. `if`, `while` and `for` on what depends on the inputs become If
    and Loop nodes, with break, continue and early return; what does not depend on them is computed while the function
    is read. Other Python functions that it calls are read in place. docs/python_functions.md has what is supported.

    Arguments:
        python_function: a plain function, lambda, method or `functools.partial`, whose source is in a file or notebook.
        example_args: a tuple with a value for each parameter, or the only one; parameters with a default may be left
            out. An array or NumPy scalar becomes an input of its type and shape, a Python number one of rank 0 (int64,
            float64 or bool) that counts as a Python number in type promotion. A dict of arrays holds weights, under
            their keys ("fc.weight", or "fc" of {"fc": {"weight": ...}} joined by a dot). Strings, None and
            functions are constants.
        symbolic: names of sizes that may be any at run time, such as {"x": {0: "batch"}} or {"x": ["batch", None]};
            a name that occurs twice means that the two sizes are equal.
        dynamic_batch: make the first axis of every input with axes the symbolic dimension "batch".

    Returns a model whose inputs are called after the parameters. Its output is "output", or "output_0", "output_1", ...
    for a tuple; a dict names them itself. Float arrays with axes that the function reads from outside (closures, module
    variables, defaults, objects) are parameters of the model under their variables' names. The same function and
    arguments give the same bytes.

    Raises FunctionError, which says file, line and column, for what has no graph.

    Example:
        def smallest_power(x, bound):
            n = 0
            while np.sum(x) < bound:
                x, n = x * x, n + 1
            return x, n

        model = archipel.function(smallest_power, (np.ones(3, np.float32) * 2, np.float32(100)))
    """
    plain, leading, keywords = _plain(python_function)
    name = plain.__name__
    code, source = definition_of(plain)
    graph = ir.Graph([], [], nodes=[], name="function", opset_imports={"": OPSET})
    reader = Reader(Emitter(Builder(graph)))
    outer = outer_names(reader, plain)
    names = _Inputs(reader, symbolic or {}, dynamic_batch, name).of(plain, leading, keywords, example_args)
    try:
        result = read(reader, name, code, source, outer, names, None)
        _name_outputs(reader, name, result)
    except UnsupportedError as error:
        raise source.error(code, str(error)) from error
    used = [n for n in reader.weights.names if graph.initializers[n].uses()]
    for unused in [n for n, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[unused]
    try:
        model = Model.from_proto(ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)), used)
    except GraphError as error:  # what the sizes of the examples rule out, and nothing above has noticed
        text = f"its graph cannot run with these examples: {one_line(error)}"
        raise source.error(code, f"{text}; give others, or name their sizes in symbolic=") from error
    simplify(model.ir, keep=used)
    share_subexpressions(model.ir)
    remove_identities(model.ir)
    ImportReport(f"Python ({name})", notes=("read from its source",)).record(model.ir)
    return model


def _plain(function: Any) -> tuple[types.FunctionType, list[Any], dict[str, Any]]:
    """The function behind partials and methods, and the arguments that these give it."""
    leading: list[Any] = []
    keywords: dict[str, Any] = {}
    while not isinstance(function, types.FunctionType):
        if isinstance(function, functools.partial):
            leading, keywords = [*function.args, *leading], {**function.keywords, **keywords}
            function = function.func
        elif isinstance(function, types.MethodType):
            leading, function = [function.__self__, *leading], function.__func__
        elif isinstance(called := vars(type(function)).get("__call__"), types.FunctionType):
            leading, function = [function, *leading], called
        else:
            raise FunctionError(f"{function!r} is not a Python function: wrap it in one, as def f(x): return np.exp(x)")
    return function, leading, keywords


class _Inputs:
    """Makes inputs of the graph from example arguments."""

    def __init__(self, reader: Reader, symbolic: Symbolic, dynamic_batch: bool, name: str) -> None:
        self._reader, self._symbolic, self._dynamic_batch, self._name = reader, symbolic, dynamic_batch, name

    def of(
        self, function: types.FunctionType, leading: list[Any], keywords: dict[str, Any], example: Any
    ) -> dict[str, Any]:
        """The function's parameters -> their values."""
        given = list(example) if isinstance(example, tuple | list) else [example]
        signature = inspect.signature(function, follow_wrapped=False)
        parameters = signature.parameters
        try:
            found = signature.bind(*leading, *given, **keywords)
        except TypeError as error:
            raise FunctionError(f"{self._name}: example_args do not fit its parameters: {error}") from None
        weights = self._reader.weights
        fixed = set(list(parameters)[: len(leading)]) | set(keywords)
        names: dict[str, Any] = {}
        for parameter in parameters.values():
            if parameter.name in fixed:
                names[parameter.name] = weights.wrap(found.arguments[parameter.name], parameter.name)
            elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                items = found.arguments.get(parameter.name, ())
                names[parameter.name] = tuple(
                    self._input(f"{parameter.name}_{i}", item) for i, item in enumerate(items)
                )
            elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
                names[parameter.name] = {}
            elif parameter.name in found.arguments:
                names[parameter.name] = self._input(parameter.name, found.arguments[parameter.name])
            else:
                names[parameter.name] = weights.wrap(parameter.default, parameter.name)
        unknown = set(self._symbolic) - {value.name for value in self._reader.e.root.graph.inputs}
        if unknown:
            raise FunctionError(f"{self._name}: symbolic= names {min(unknown)!r}, which is no input")
        return names

    def _input(self, name: str, example: Any) -> Any:
        if example is None or isinstance(example, str | bytes | Mapping) or callable(example):
            return self._reader.weights.wrap(example, name)
        python = python_type(example)
        if not is_numeric(example) and not hasattr(example, "__array__"):
            raise FunctionError(
                f"{self._name}: the example of {name!r} is {type(example).__name__}; give an array, a number or a dict "
                "of weights"
            )
        array = np.asarray(example, None if python is None else PYTHON_TYPES[python])
        if array.dtype not in DTYPES:
            kinds = ", ".join(sorted(map(str, DTYPES)))
            raise FunctionError(f"{self._name}: the example of {name!r} is of type {array.dtype}; supported: {kinds}")
        e = self._reader.e
        shape = self._shape(name, array.shape)
        value = e.root.input(name, ir.DataType.from_numpy(array.dtype), shape)
        tensor = Tensor(value, python=python)
        if array.ndim:
            self._reader.foreign.update(tensor.storage)
        for axis, dim in enumerate(dims(value)):
            if isinstance(dim, str) and dim not in e.sizes:
                size = e.size(tensor, axis)
                assert isinstance(size, Tensor)
                e.sizes[dim] = size
        return tensor

    def _shape(self, name: str, sizes: tuple[int, ...]) -> list[int | str]:
        shape: list[int | str] = list(sizes)
        if self._dynamic_batch and shape:
            shape[0] = BATCH
        names = self._symbolic.get(name, {})
        pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
        for axis, dim in pairs:
            if not -len(sizes) <= axis < len(sizes):
                raise FunctionError(
                    f"{self._name}: symbolic= names axis {axis} of {name!r}, an array with {len(sizes)} axes"
                )
            if dim is not None:
                shape[axis] = dim
        return shape


def _name_outputs(reader: Reader, name: str, result: Any) -> None:
    op = reader.e.root
    if isinstance(result, dict):
        outputs = {str(key): value for key, value in result.items()}
    elif isinstance(result, tuple | list):
        outputs = {f"output_{i}": value for i, value in enumerate(result)}
    else:
        outputs = {"output": result}
    if not outputs:
        refuse(f"{name} returns nothing; return an array, or a tuple of arrays")
    taken = {value.name for value in op.graph.inputs} | set(reader.weights.names)
    for key, value in outputs.items():
        if key in taken:
            refuse(f"{name}: an input or weight is called {key!r} like an output; give it another name")
        if not is_numeric(value):
            what = "nothing" if value is None else type(value).__name__
            refuse(f"{name} returns {what} as {key!r}; return arrays or numbers")
        op.free_name(key)
        op.name_output(reader.e.value(value), key)
