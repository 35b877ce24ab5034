"""From gradients to new values: transforms, then the optimizer, in every step or only where a condition holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from archipel.bundle.roles import Broadcast, Hyperparameter, Start, Step
from archipel.errors import TrainingError
from archipel.graph.build import Builder
from archipel.graph.control import branch
from archipel.graph.model import TensorInfo
from archipel.graph.shapes import dtype_of
from archipel.training.assembly import Assembly
from archipel.training.context import Anchor
from archipel.training.optimizers import Optimizer
from archipel.training.transforms import Transform


def minibatch(work: Assembly) -> ir.Value:
    """The number of the minibatch in the round, int64 scalar, from 0."""
    return work.input(Step, "step", ir.DataType.INT64, [])


class Update:
    """The optimizer in a step, with its state and hyperparameters as inputs. It is the optimizer's StepContext, too.

    An update takes `every` minibatches; `may_skip` says whether some updates may be left out.
    """

    def __init__(
        self, work: Assembly, optimizer: Optimizer, transforms: Sequence[Transform], every: int, may_skip: bool
    ) -> None:
        self._work = work
        self._optimizer = optimizer
        self._transforms = transforms
        self._every = every
        self._may_skip = may_skip
        self._counted: ir.Value | None = None
        self._states = [
            {spec.name: work.state(f"{p.name}.{spec.name}", p, spec.init) for spec in optimizer.init()}
            for p in work.parameters
        ]
        self.hyperparameters: Mapping[str, ir.Value] = self._hyperparameters()

    def step(self) -> ir.Value:
        """See StepContext. Skipped updates do not count, so with `may_skip` the count is state of its own."""
        if self._may_skip:
            self._counted = self._work.scalar_state("updates", ir.DataType.INT64, 0)
            return self._counted
        number = minibatch(self._work)  # integer division: of A minibatches each, the first A have the number 0
        return number if self._every == 1 else self._work.op.Div(number, self._every)

    def state(self, parameter: ir.Value, name: str) -> ir.Value:
        return self._work.state(f"{name}/{parameter.name}", parameter)

    def anchor(self, parameter: ir.Value, kind: Anchor) -> ir.Value:
        role = Start if kind == "start" else Broadcast
        shape = TensorInfo.of(parameter).shape
        name = f"{parameter.name}.{kind}"
        return self._work.input(role, name, dtype_of(parameter), shape, tensor=parameter.name)

    def emit(self, gradients: Sequence[ir.Value], when: ir.Value | None) -> None:
        """New parameters and state as outputs; the old ones where `when` (bool scalar) is false.

        `gradients` are sums over `every` minibatches."""
        work, parameters = self._work, self._work.parameters
        before = [*parameters, *(value for state in self._states for value in state.values())]
        if when is None:  # as an If: a minibatch that makes no update saves the time of the optimizer
            after = self._new_values(work.op, gradients)
        else:
            after = branch(work.op, when, lambda op: self._new_values(op, gradients), lambda _: before, like=before)
        for old, new in zip(before, after):
            work.set_next(old, new)
        if self._counted is not None and when is not None:
            made = work.op.Cast(when, to=int(ir.DataType.INT64))  # 1 for an update, 0 for none
            work.set_next(self._counted, work.op.Add(self._counted, made))

    def _new_values(self, op: Builder, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        """Parameters, then all state, in the order that `emit` has the old values in."""
        parameters = self._work.parameters
        gradients = list(gradients)
        if self._every > 1:  # the mean first, so that clipping and the optimizer have gradients of the usual size
            gradients = [op.Mul(total, 1.0 / self._every) for total in gradients]
        for transform in self._transforms:
            with op.scope(type(transform).__name__):
                gradients = transform.apply(op, parameters, gradients, self)
        values: list[ir.Value] = []
        states: list[ir.Value] = []
        for parameter, gradient, state in zip(parameters, gradients, self._states):
            with op.scope(f"{parameter.name}.update"):
                updated = self._optimizer.update(op, parameter, gradient, state, self)
            values.append(updated.parameter)
            states.extend(updated.state[name] for name in state)
        return [*values, *states]

    def _hyperparameters(self) -> dict[str, ir.Value]:
        specs = [*self._optimizer.hyperparameters]
        for transform in self._transforms:
            specs.extend(transform.hyperparameters)
        inputs: dict[str, ir.Value] = {}
        for spec in specs:
            if spec.name in inputs:
                raise TrainingError(
                    f"two parts of the step have a hyperparameter {spec.name!r}; leave one of them out of transforms "
                    "or the optimizer"
                )
            inputs[spec.name] = self._work.input(
                Hyperparameter, spec.name, ir.DataType.FLOAT, [],
                default=float(spec.default), minimum=float(spec.minimum), maximum=float(spec.maximum),
            )  # fmt: skip
        return inputs


class Accumulation:
    """Sums of gradients over `every` minibatches, kept as state `<parameter>.accumulated`."""

    def __init__(self, work: Assembly, every: int) -> None:
        self._work = work
        self._every = every
        self._sums = [work.state(f"{p.name}.accumulated", p) for p in work.parameters]
        with work.op.scope("accumulate"):
            place = work.op.Mod(minibatch(work), every)
            self.due = work.op.Equal(place, every - 1)

    def add(self, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        """The sums with these gradients added. Where `due` they are of `every` minibatches, and then start from 0."""
        work = self._work
        with work.op.scope("accumulate"):
            sums = [work.op.Add(total, gradient) for total, gradient in zip(self._sums, gradients)]
            # Where an update takes the sums, the next ones start from 0.
            empty = branch(
                work.op, self.due, lambda op: [op.full_like(total, 0.0) for total in sums], lambda _: sums, like=sums
            )
            for before, after in zip(self._sums, empty):
                work.set_next(before, after)
        return sums
