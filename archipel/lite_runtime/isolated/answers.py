"""Checks the answers of a child process against the bundle's manifest before the parent uses them.

The child has run graphs of others, which may have taken it over. An invalid answer ends the child, and the parent takes
nothing from it.
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

    `disbelieve` gets the request's name and what is wrong with its answer; it ends the child and returns the
    RuntimeProgramError to raise.
    """

    def __init__(self, bundle: Bundle, disbelieve: Callable[[str, str], RuntimeProgramError]) -> None:
        self._bundle = bundle
        self._disbelieve = disbelieve

    def take_outputs(self, program: Program, outputs: Arrays, several: bool) -> dict[str, np.ndarray]:
        """The outputs of `predict` by name, writable for the caller. Unless `several`, the only one travels as `y`."""
        ports = {port.name: port for port in program.outputs}
        answers = group("y", outputs) if several else {name: outputs["y"] for name in ports if "y" in outputs}
        # The second test finds arrays beside the outputs, which `group` leaves out.
        if set(answers) != set(ports) or len(outputs) != len(ports):
            raise self._disbelieve("predict", f"outputs {sorted(outputs)} are not those of the program")
        for name, array in answers.items():
            try:
                check_array("predict", ports[name], array)
            except RuntimeInputError as error:
                # The child is kept: a wrong manifest does this too, and it is no sign of an attack.
                raise RuntimeProgramError(f"{error}: the graph's answer is not as the manifest declares") from None
            array.flags.writeable = bool(array.nbytes)
        return answers

    def check_metrics(self, what: str, program: Program, metrics: Mapping[str, object]) -> None:
        """End the child and raise, if `metrics` has others than the program's."""
        expected = {port.name for port in program.outputs if isinstance(port, Metric)}
        if not set(metrics) <= expected:
            raise self._disbelieve(what, f"metrics {sorted(metrics)}, expected {sorted(expected)}")

    def take_sums(self, program: Program, examples: int, reply: Analyzed, sums: Arrays) -> dict[str, np.ndarray]:
        """The sums of an `analyze` program over `examples` examples, by output name."""
        kinds = {f"update/{port.name}": _kind(port) for port in program.outputs if isinstance(port, Update)}
        self._check_kinds("analyze", sums, kinds)
        if set(sums) != set(kinds) or reply.examples != examples:
            raise self._disbelieve("analyze", f"it made {sorted(sums)} of {reply.examples} examples")
        return group("update", sums)

    def take_metrics(self, name: str, reply: Fitted, results: Arrays) -> dict[str, np.ndarray]:
        """The metrics of a fit of program `name`, one element a step; the losses are `results["loss"]`."""
        program = self._bundle.program(name)
        metrics = group("metric", results)
        self.check_metrics("fit", program, metrics)
        self._check_columns("fit", {**metrics, "loss": results.get("loss")}, reply.steps)
        for epoch in reply.validation:
            evaluation = find_program(self._bundle, "evaluate")
            self.check_metrics("fit", self._bundle.program(evaluation or name), epoch)
        return metrics

    def take_round(
        self, program: Program, reply: Rounded, results: Arrays
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The update that the `finish` program made, and the parameters as they were trained, both by name."""
        update, trained = group("update", results), group("trained", results)
        ports = {port.name: port for port in program.outputs if isinstance(port, Update)}
        specs = {spec.name: spec for spec in self._bundle.manifest.parameters}
        # All parameters, also those that no phase moves: the caller gets the whole trained model.
        if set(update) != set(ports) or set(trained) != set(specs):
            raise self._disbelieve("local_round", f"it made {sorted(results)}")
        kinds = {f"update/{name}": _kind(port) for name, port in ports.items()}
        kinds.update({f"trained/{name}": _kind(spec) for name, spec in specs.items()})
        self._check_kinds("local_round", results, kinds)
        self._check_columns("local_round", {"loss": results.get("loss")}, reply.steps)
        return update, trained

    def check_learned(self, what: str, learned: Arrays, state: DeviceState) -> None:
        """End the child and raise, if `learned` has a tensor that neither the bundle's programs nor `state` have."""
        ports = {
            (role_of(port), port.tensor): port
            for program in self._bundle.manifest.programs.values()
            for port in (*program.inputs, *program.outputs)
            if isinstance(port, Parameter | Personal | State)
        }
        for name, array in learned.items():
            role, _, tensor = name.partition("/")
            port = ports.get((role, tensor))
            # A tensor of another version of the model: no program reads it, but the state keeps it.
            before = getattr(state, role, {}).get(tensor) if port is None else None
            fits = before is not None if port is None else (array.dtype.name, array.shape) == _kind(port)
            if not fits:
                raise self._disbelieve(what, f"it has learned {name!r}: {array.dtype}{list(array.shape)}")

    def _check_kinds(self, what: str, arrays: Arrays, kinds: Mapping[str, _Kind]) -> None:
        for name, kind in kinds.items():
            if name in arrays and (arrays[name].dtype.name, arrays[name].shape) != kind:
                raise self._disbelieve(what, f"{name!r} is {arrays[name].dtype}{list(arrays[name].shape)}")

    def _check_columns(self, what: str, columns: Mapping[str, np.ndarray | None], steps: int) -> None:
        for name, array in columns.items():
            # (0,) is for a program without a loss.
            if array is None or array.dtype != np.float64 or array.shape not in ((steps,), (0,)):
                raise self._disbelieve(what, f"{name!r} does not have {steps} steps")


def _kind(of: Port | TensorSpec) -> _Kind:
    return of.dtype, of.shape
