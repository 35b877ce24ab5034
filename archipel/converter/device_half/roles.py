"""Which role a tensor has in a program: shared, personal, a device's own copy, or held still.

The programs that `training` makes have parameters only. Here their tensors get the roles that a federated algorithm
gives them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from archipel.bundle.roles import Example, Parameter, Personal, Port, Program, Start, State, Step
from archipel.errors import ConversionError, GraphError
from archipel.graph import Builder, Model
from archipel.graph.parameters import match
from archipel.strategies.device import COPY, RunningPair
from archipel.training.assembly import NEXT


@dataclass(frozen=True)
class Division:
    """The trained tensors by name. `shared` ones are uploaded, `personal` ones stay on the device.

    `copied` says whether a part of the round trains a device's own copies of the parameters. `statistics` are running
    statistics that are averaged like parameters; others stay on the device.
    """

    shared: dict[str, np.ndarray]
    personal: dict[str, np.ndarray]
    copied: bool
    statistics: tuple[RunningPair, ...] = ()

    @property
    def all(self) -> list[str]:
        return [*self.shared, *self.personal]


def select(names: Sequence[str], patterns: Sequence[str], strategy: str, option: str) -> list[str]:
    """The names that match one of the globs. Raises ConversionError for a glob that matches none."""
    try:
        return match(names, patterns)
    except GraphError as error:
        raise ConversionError(f"strategy {strategy!r}: {option}: {error}") from None


def assign_roles(
    program: Model,
    division: Division,
    *,
    copies: bool = False,
    still: Collection[str] = (),
    own: str = "",
    given: Mapping[str, Port] | None = None,
) -> Model:
    """The program, whose graph changes, with the roles that the algorithm gives its tensors.

    `copies`: parameters are the device's own copies, and what else it keeps too. `still`: inputs that are parameters or
    personal tensors held still. `own`: a name that keeps the optimizer's state and step count apart from those of the
    round's other programs. `given`: the ports of inputs that are no fields, by name.
    """
    signature = program.program
    averaged = {name for pair in division.statistics for name in (pair.mean, pair.variance)}

    def role(port: Port) -> Port:
        match port:
            case Example() if given and port.name in given:
                return given[port.name]
            # `step_graph` takes an input that it does not train for a field. It gets the role that its tensor has.
            case Example() if port.name in still:
                return role(Parameter(name=port.name, dtype=port.dtype, shape=port.shape, tensor=port.name))
            # Nothing but the steps of training moves it, and devices share it.
            case State(lifetime="device") if port.tensor in averaged:
                return role(Parameter(name=port.name, dtype=port.dtype, shape=port.shape, tensor=port.tensor))
            case Parameter() if port.tensor in division.personal:
                return Personal(name=port.name, dtype=port.dtype, shape=port.shape, tensor=port.tensor)
            # A copy has a name of its own and starts from the parameter, which stays as the server sent it.
            case Parameter() if copies:
                copy = COPY + port.tensor
                return Personal(name=port.name, dtype=port.dtype, shape=port.shape, tensor=copy, init=port.tensor)
            # Of the copy alone, which must not move what the shared model has.
            case State(lifetime="device") if copies:
                return msgspec.structs.replace(port, tensor=COPY + port.tensor)
            # The optimizer's: a part of the round must not go on with the momentum of another one.
            case State(lifetime="round") if own:
                return msgspec.structs.replace(port, tensor=f"{own}/{port.tensor}")
        return port

    graph = program.ir.graph
    inputs = tuple(map(role, signature.inputs))
    outputs = tuple(map(role, signature.outputs))
    for value, port in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        if value.name != port.name:
            value.name = port.name
    changed = msgspec.structs.replace(signature, inputs=inputs, outputs=outputs)
    result = Model(program.ir, signature=changed, initial=program.initial)
    return _with_own_count(result, changed, own) if own else result


def assign_start(program: Model, division: Division, strategy: str, kept: Collection[str] = ()) -> Model:
    """The program, whose graph changes, which reads every tensor as the device received it, whatever was trained since.

    `kept` are states of the device that are none of the model's tensors.

    Raises ConversionError where tensors of the model stay on the device, which have no such value.
    """
    signature, averaged = program.program, {name for pair in division.statistics for name in (pair.mean, pair.variance)}

    def role(port: Port) -> Port:
        if isinstance(port, Parameter) or (
            isinstance(port, State) and port.lifetime == "device" and port.tensor not in kept
        ):
            if port.tensor not in division.shared and port.tensor not in averaged:
                raise ConversionError(
                    f"strategy {strategy!r}: measures the received model, but {port.tensor!r} stays on the device"
                )
            return Start(name=f"{port.name}.start", dtype=port.dtype, shape=port.shape, tensor=port.tensor)
        return port

    inputs = tuple(map(role, signature.inputs))
    op = Builder(program.ir.graph)
    for value, port in zip(program.ir.graph.inputs, inputs, strict=True):
        if value.name != port.name:
            op.free_name(port.name)
            value.name = port.name
    return Model(program.ir, signature=msgspec.structs.replace(signature, inputs=inputs), initial={})


def _with_own_count(program: Model, signature: Program, own: str) -> Model:
    """Let the program count its own steps from 0: the runtime's number goes on through all programs of a round."""
    inputs = list(signature.inputs)
    place = next((i for i, port in enumerate(inputs) if isinstance(port, Step)), None)
    if place is None:
        return program
    port, value = inputs[place], program.ir.graph.inputs[place]
    # State of lifetime "round" starts as 0, so this is what the runtime's number would be if the round began here.
    state = State(name=port.name, dtype=port.dtype, shape=port.shape, tensor=f"{own}/{port.name}", lifetime="round")
    inputs[place] = state
    op = Builder(program.ir.graph)
    following = port.name + NEXT
    op.free_name(following)
    op.name_output(op.Add(value, np.ones((), port.dtype)), following)
    outputs = (*signature.outputs, msgspec.structs.replace(state, name=following))
    changed = msgspec.structs.replace(signature, inputs=tuple(inputs), outputs=outputs)
    return Model(program.ir, signature=changed, initial=program.initial)
