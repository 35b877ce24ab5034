"""What a child process may answer: every answer is held against the bundle's manifest before it is believed.

The child has run graphs of others. An answer that cannot be right ends it, and teaches the parent nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from archipel.bundle import Bundle, Program
from archipel.bundle.manifest import TensorSpec
from archipel.bundle.roles import Metric, Parameter, Personal, Port, State, Update, role_of
from archipel.errors import RuntimeInputError, RuntimeProgramError
from archipel.lite_runtime.device_state import DeviceState
from archipel.lite_runtime.fields import check_array
from archipel.lite_runtime.isolated.messages import Analyzed, Fitted, Rounded
from archipel.lite_runtime.isolated.packing import group
from archipel.lite_runtime.training.driver import find_program

Arrays = Mapping[str, np.ndarray]
_Kind = tuple[str, tuple[int | str, ...]]


class Answers:
    """Checks the answers to requests about `bundle`, and takes them apart.

    `disbelieve` is given the request and what is wrong with the answer; it ends the child and gives the error that is
    raised: RuntimeProgramError.
    """

    def __init__(self, bundle: Bundle, disbelieve: Callable[[str, str], RuntimeProgramError]) -> None:
        self._bundle = bundle
        self._disbelieve = disbelieve

    def take_outputs(self, program: Program, found: Arrays, several: bool) -> dict[str, np.ndarray]:
        """The outputs of `predict` by name, which are the caller's own now; not `several`: the only one is `y`."""
        ports = {port.name: port for port in program.outputs}
        answers = group("y", found) if several else {name: found["y"] for name in ports if "y" in found}
        if set(answers) != set(ports) or len(found) != len(ports):
            raise self._disbelieve("predict", f"outputs {sorted(found)} are not those of the program")
        for name, array in answers.items():
            try:
                check_array("predict", ports[name], array)
            except RuntimeInputError as error:
                raise RuntimeProgramError(f"{error}: the graph answers what the manifest does not say") from None
            array.flags.writeable = bool(array.nbytes)
        return answers

    def check_metrics(self, what: str, program: Program, found: Mapping[str, object]) -> None:
        """`found` has none but the program's metrics."""
        expected = {port.name for port in program.outputs if isinstance(port, Metric)}
        if not set(found) <= expected:
            raise self._disbelieve(what, f"metrics {sorted(found)}, expected {sorted(expected)}")

    def take_sums(self, program: Program, examples: int, reply: Analyzed, found: Arrays) -> dict[str, np.ndarray]:
        """The sums of an `analyze` program over so many examples, by output name."""
        kinds = {f"update/{port.name}": _kind(port) for port in program.outputs if isinstance(port, Update)}
        self._check_kinds("analyze", found, kinds)
        if set(found) != set(kinds) or reply.examples != examples:
            raise self._disbelieve("analyze", f"it made {sorted(found)} of {reply.examples} examples")
        return group("update", found)

    def take_metrics(self, name: str, reply: Fitted, found: Arrays) -> dict[str, np.ndarray]:
        """The metrics of a fit of program `name`, one element a step; the losses are `found["loss"]`."""
        program = self._bundle.program(name)
        metrics = group("metric", found)
        self.check_metrics("fit", program, metrics)
        self._check_columns("fit", {**metrics, "loss": found.get("loss")}, reply.steps)
        for epoch in reply.validation:
            validated = find_program(self._bundle, "evaluate")
            self.check_metrics("fit", self._bundle.program(validated or name), epoch)
        return metrics

    def take_round(
        self, program: Program, reply: Rounded, found: Arrays
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The update that the `finish` program made, and the parameters as they were trained, both by name."""
        update, trained = group("update", found), group("trained", found)
        ports = {port.name: port for port in program.outputs if isinstance(port, Update)}
        specs = {spec.name: spec for spec in self._bundle.manifest.parameters}
        if set(update) != set(ports) or set(trained) != set(specs):
            raise self._disbelieve("local_round", f"it made {sorted(found)}")
        kinds = {f"update/{name}": _kind(port) for name, port in ports.items()}
        kinds.update({f"trained/{name}": _kind(spec) for name, spec in specs.items()})
        self._check_kinds("local_round", found, kinds)
        self._check_columns("local_round", {"loss": found.get("loss")}, reply.steps)
        return update, trained

    def check_learned(self, what: str, learned: Arrays, state: DeviceState) -> None:
        """`learned` has none but tensors that the bundle's programs move, or that `state` has already."""
        ports = {
            (role_of(port), port.tensor): port
            for program in self._bundle.manifest.programs.values()
            for port in (*program.inputs, *program.outputs)
            if isinstance(port, Parameter | Personal | State)
        }
        for name, array in learned.items():
            role, _, tensor = name.partition("/")
            port = ports.get((role, tensor))
            before = getattr(state, role, {}).get(tensor) if port is None else None
            fits = before is not None if port is None else (array.dtype.name, array.shape) == _kind(port)
            if not fits:
                raise self._disbelieve(what, f"it has learned {name!r}: {array.dtype}{list(array.shape)}")

    def _check_kinds(self, what: str, found: Arrays, kinds: Mapping[str, _Kind]) -> None:
        for name, kind in kinds.items():
            if name in found and (found[name].dtype.name, found[name].shape) != kind:
                raise self._disbelieve(what, f"{name!r} is {found[name].dtype}{list(found[name].shape)}")

    def _check_columns(self, what: str, columns: Mapping[str, np.ndarray | None], steps: int) -> None:
        for name, array in columns.items():
            if array is None or array.dtype != np.float64 or array.shape not in ((steps,), (0,)):
                raise self._disbelieve(what, f"{name!r} does not have {steps} steps")


def _kind(of: Port | TensorSpec) -> _Kind:
    return of.dtype, of.shape
