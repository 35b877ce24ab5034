"""From a graph that trains to the one that devices run, and the program that refreshes it after training.

Everything that depends on parameters alone (folded normalizations, masks, scales, rounding) is computed once: `predict`
keeps the results as initializers, and the same computation, cut off as a graph of its own, becomes the `refresh`
program. This is partial evaluation; nothing in it knows a compression scheme. A parameter that is only laid out
differently (Transpose, Reshape) keeps its name and shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import onnx_ir as ir
import onnxruntime

from archipel.bundle import Program
from archipel.bundle.roles import Derived, DType, Parameter, State
from archipel.compression.integer_forms import use_integer_forms
from archipel.errors import CompressionError
from archipel.graph import Builder, Model
from archipel.graph.functions import inline_functions
from archipel.graph.opset import IR_VERSION
from archipel.graph.parameters import promote, record_parameters
from archipel.graph.passes import remove_dead_code
from archipel.graph.passes.constants import UNPACK, gives_tensors, is_laid_out
from archipel.graph.passes.inference import optimize_for_inference
from archipel.graph.walk import computable_values, dependencies, descendants, values
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.onnx_runtime import error_types
from archipel.training.batch_norm import prepared
from archipel.training.folding import fold_batch_norm_symbolic


@dataclass(frozen=True)
class Deployment:
    """`predict` with stored constants; `graph` is the same before they are computed, `stored` are their names.

    `parameters` are all parameters of the model, also those that nothing depends on any more.
    """

    predict: Model
    graph: ir.Model
    stored: tuple[str, ...]
    parameters: frozenset[str]


def deploy(model: Model) -> Deployment:
    """The form of `model` that devices run. Raises CompressionError if its constants cannot be computed."""
    work = prepared(model, "frozen")
    inline_functions(work.ir)
    parameters = set(model.parameter_names)
    fold_batch_norm_symbolic(work.ir)
    # Before optimization: it looks for the nodes that the simulation writes. Parameters stay initializers of their own,
    # from which `refresh` starts.
    use_integer_forms(work.ir, constants(work.ir.graph))
    optimize_for_inference(work.ir, keep=set(work.ir.graph.initializers) & parameters)
    graph = work.ir
    # A parameter that is read as it is, or in another layout, needs no computation, and keeps its name: runtimes lay it
    # out once, when they open the graph, and a second copy of it would double the download.
    stored = [value for value in _frontier(graph.graph) if not is_laid_out(value)]
    _name(stored, Builder(graph.graph))
    contents = evaluate_constants(graph, [str(value.name) for value in stored])
    predict = graph.clone()
    _store(predict, contents)
    _shorten(predict, getattr(model, "training_form", None) or model)
    kept = parameters | contents.keys()
    record_parameters(predict, [name for name in predict.graph.initializers if name in kept])
    return Deployment(Model(predict), graph, tuple(contents), frozenset(parameters))


def refresh_program(
    deployment: Deployment, parameters: Mapping[str, np.ndarray], statistics: Mapping[str, State] | None = None
) -> Model:
    """A Model with the signature of `refresh`: `parameters` -> every initializer of `predict` that derives from them.

    `statistics`: state, by the name of the initializer that it replaces: running averages, which training moves.
    Raises CompressionError for a parameter that the graph does not have.
    """
    for name in parameters:
        if name not in deployment.parameters:
            raise CompressionError(f"refresh: the model has no parameter {name!r}")
    work = deployment.graph.clone()
    graph = work.graph
    moving = [*parameters, *(statistics or {})]
    derived = descendants(graph, [graph.initializers[name] for name in moving if name in graph.initializers])
    predicted = deployment.predict.ir.graph.initializers
    targets = [*moving, *deployment.stored]
    outputs: list[Derived] = []
    graph.outputs.clear()
    op = Builder(graph, scope="refresh")
    by_name = {str(value.name): value for value in values(graph)}
    # Dead code goes below: what leads to stored tensors reads no example, so all inputs of the graph can go too.
    # Initializers that `predict` lacks, such as folded ones, need no refresh.
    for name in targets:
        value = by_name.get(name)
        if name not in predicted or value is None or value not in derived:
            continue
        content = _content(predicted[name])
        out = op.name_output(value, f"{name}.next")
        dtype = cast(DType, content.dtype.name)
        outputs.append(Derived(name=str(out.name), tensor=name, dtype=dtype, shape=content.shape))
    remove_dead_code(work)
    graph.inputs.clear()
    for name in moving:
        if name not in graph.initializers:
            # No stored tensor derives from it, but the program's signature has all of `moving`.
            array = parameters[name] if name in parameters else _zeros((statistics or {})[name])
            value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            value.type, value.shape = ir.TensorType(ir.DataType.from_numpy(array.dtype)), ir.Shape(array.shape)
            graph.register_initializer(value)
    # Parameters become inputs of the program.
    promote(work, moving)
    inputs: list[Parameter | State] = [
        Parameter(name=name, tensor=name, dtype=cast(DType, array.dtype.name), shape=array.shape)
        for name, array in parameters.items()
    ]
    for name, state in (statistics or {}).items():
        value = next(value for value in graph.inputs if value.name == name)
        value.name = state.name
        inputs.append(state)
    graph.name = "refresh"
    work.metadata_props.clear()
    work.ir_version = IR_VERSION
    return Model(
        work, signature=Program(kind="refresh", inputs=tuple(inputs), outputs=tuple(outputs)), initial=dict(parameters)
    )


def _zeros(state: State) -> np.ndarray:
    return np.zeros([int(d) for d in state.shape], np.dtype(state.dtype))


def evaluate_constants(model: ir.Model, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Compute values that no input of the graph changes, by name. Raises CompressionError where that fails."""
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    work = model.clone()
    graph = work.graph
    by_name = {str(value.name): value for value in values(graph)}
    graph.outputs.clear()
    op = Builder(graph, scope="constants")
    outputs = [str(op.name_output(op.Identity(by_name[name]), f"{name}.value").name) for name in wanted]
    remove_dead_code(work)
    graph.inputs.clear()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(
            ir.to_proto(work).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return dict(zip(wanted, session.run(outputs, {})))
    except error_types() as error:
        raise CompressionError(f"the model's constants cannot be computed: {one_line(error)}") from None


def constants(graph: ir.Graph) -> set[ir.Value]:
    """Initializers, and what is computed from them alone."""
    return computable_values(filter(_is_deterministic, graph), graph.initializers.values())


def _frontier(graph: ir.Graph) -> list[ir.Value]:
    """The constants that are read by nodes which run with every prediction, in the graph's order.

    A node that unpacks (DequantizeLinear, or one marked UNPACK) counts as such, so its input is stored in small form.
    """
    once = (node for node in graph if _is_deterministic(node) and gives_tensors(node) and not _unpacks(node))
    known = computable_values(once, graph.initializers.values())
    read: dict[ir.Value, None] = {}
    for node in graph:
        if node.outputs[0] not in known:
            read.update(dict.fromkeys(value for value in dependencies(node) if value in known))
    read.update(dict.fromkeys(value for value in graph.outputs if value in known))
    return list(read)


def _name(values: Sequence[ir.Value], names: Builder) -> None:
    """Name stored values after the tensor that they come from: manifests, learned files and reports show the names."""
    new_names: dict[ir.Value, str] = {}
    for value in values:
        uses = [use for use in value.uses() if _unpacks(use.node)]
        suffix, tensor = "_computed", value
        if uses and uses[0].node.op_type == "DequantizeLinear":
            suffix = ("_quantized", "_scale", "_zero_point")[uses[0].idx]
            tensor = uses[0].node.inputs[0] or value
        elif uses:
            suffix = "_quantized" if value.dtype is not None and value.dtype.is_integer() else "_scale"
        new_names[value] = f"{_origin(tensor)}{suffix}"
    # In a second loop: `_origin` reads the old names.
    for value, name in new_names.items():
        if not value.is_graph_output():
            value.name = names.unique(name)


def _shorten(predict: ir.Model, source: Model) -> None:
    """Shorten the names that `source` does not have: they would be a tenth of a small file."""
    # Names of the source stay: users and reports know them.
    known = {str(name) for node in source.ir.graph.all_nodes() for name in (node.name, *(v.name for v in node.outputs))}
    taken = known | set(predict.graph.initializers) | {str(value.name) for value in values(predict.graph)}
    count = 0
    for node in predict.graph.all_nodes():
        for value in node.outputs:
            if value.name and value.name not in known and not value.is_graph_output():
                while f"_{count}" in taken:
                    count += 1
                value.name, count = f"_{count}", count + 1
        if node.name not in known:
            node.name = node.outputs[0].name


def _origin(value: ir.Value) -> str:
    """The first tensor on the way back with a name from the model; generated names have a "/"."""
    node = value.producer()
    while node is not None and "/" in str(value.name):
        before = next((v for v in node.inputs if v is not None), None)
        if before is None:
            break
        value, node = before, before.producer()
    return str(value.name)


def _unpacks(node: ir.Node) -> bool:
    return node.op_type == "DequantizeLinear" or UNPACK in node.metadata_props


def _is_deterministic(node: ir.Node) -> bool:
    """Whether the same inputs always give the same outputs."""
    return not node.op_type.startswith("Random") and node.op_type not in ("Multinomial", "Bernoulli")


def _store(model: ir.Model, contents: Mapping[str, np.ndarray]) -> None:
    graph = model.graph
    by_name = {str(value.name): value for value in values(graph)}
    for name, content in contents.items():
        computed = by_name[name]
        tensor = ir.tensor(content, name=name)
        computed.name = f"{name}/computed"
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(content.shape), const_value=tensor)
        graph.register_initializer(value)
        if computed.is_graph_output():
            # A graph output must be computed by a node.
            value = Builder(graph, scope="stored").Identity(value)
            value.name, value.const_value = name, None
        computed.replace_all_uses_with(value, replace_graph_outputs=True)
    remove_dead_code(model)


def _content(value: ir.Value) -> np.ndarray:
    if value.const_value is None:
        raise CompressionError(f"predict: initializer {value.name!r} has no value")
    return value.const_value.numpy()
