"""Self-test: compares a loaded model's answers to the bundle's own examples with the outputs that its publisher got.

It finds a runtime, a processor or a delegate that computes something else than the publisher's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle import Bundle, Program, SelfTest, read_weights
from archipel.bundle.roles import Dim, Example, Port
from archipel.errors import RuntimeInputError, RuntimeProgramError, SelfTestError, TensorLayoutError
from archipel.lite_runtime.fields import check_array, describe
from archipel.lite_runtime.training.driver import need_program

if TYPE_CHECKING:
    from archipel.lite_runtime.interface import ModelRuntime

MAX_SELF_TEST_BYTES = 64 << 20


@dataclass(frozen=True)
class SelfTestReport:
    """A self-test that passed.

    `vectors` says whether the bundle has test vectors. Without them the report only says that the model loads and
    answers one example of zeros with finite numbers of the declared dtype and shape. `deviations` is the largest
    absolute difference from the expected values, by output name; empty without vectors. `source` is that of the
    examples, as in the manifest.
    """

    vectors: bool
    examples: int
    deviations: dict[str, float]
    source: str = ""

    def __str__(self) -> str:
        if not self.vectors:
            return "no vectors in the bundle; predict answers an example of zeros with finite numbers"
        largest = ", ".join(f"{name} {value:.2g}" for name, value in self.deviations.items())
        return f"{describe_vectors(self.examples, self.source)}, largest deviation: {largest}"


def describe_vectors(count: int, source: str) -> str:
    """What test vectors cover, in words."""
    kind = {"drawn": " of pseudo-random numbers", "given": " of the publisher"}.get(source, "")
    return f"predict on {count} example{'' if count == 1 else 's'}{kind}"


def count_examples(file: Path) -> int:
    """How many examples a file of test vectors has. Raises TensorLayoutError, OSError."""
    tensors = read_weights(file, MAX_SELF_TEST_BYTES)
    return _count_rows(array for name, array in tensors.items() if name.startswith("example/"))


def run_self_test(runtime: ModelRuntime) -> SelfTestReport:
    """Compare `predict` with the test vectors of the runtime's bundle; without vectors, predict one example of zeros.

    The vectors belong to the published parameters: for a slot with learned ones, load its bundle without them. Raises
    SelfTestError, which names the output and its largest deviation, RuntimeInputError for a runtime that has learned,
    and what loading the graph raises.
    """
    bundle = runtime.bundle
    program = bundle.program(need_program(bundle, "predict", "be tested"))
    _check_published(runtime)
    test = bundle.manifest.self_test
    if test is None:
        return answer_zeros(runtime)
    examples, expected = read_vectors(bundle, program, test)
    answers = _predict_checked(runtime, program, examples)
    deviations = {name: _compare(name, answers[name], values, test) for name, values in expected.items()}
    return SelfTestReport(True, _count_rows(examples.values()), deviations, test.source)


def read_vectors(
    bundle: Bundle, program: Program, test: SelfTest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The examples and the expected outputs by port name. Raises SelfTestError for a file that is not as declared."""
    try:
        tensors = read_weights(bundle.folder / test.file, MAX_SELF_TEST_BYTES)
    except TensorLayoutError as error:
        raise SelfTestError(f"self-test of {bundle.manifest.name!r}: {error}") from None
    examples = {port.name: port for port in program.inputs if isinstance(port, Example)}
    outputs = {port.name: port for port in program.outputs}
    names = {f"example/{name}" for name in examples} | {f"output/{name}" for name in outputs}
    if set(tensors) != names:
        raise SelfTestError(
            f"self-test of {bundle.manifest.name!r}: {test.file} must hold exactly {', '.join(sorted(names))}; "
            f"only one of the two has {', '.join(sorted(set(tensors) ^ names))}"
        )
    given: dict[str, np.ndarray] = {}
    expected: dict[str, np.ndarray] = {}
    dims: dict[str, tuple[int, str]] = {}
    for kind, ports, arrays in (("example", examples, given), ("output", outputs, expected)):
        for name, port in ports.items():
            array = arrays[name] = tensors[f"{kind}/{name}"]
            try:
                check_array(f"{test.file}: {kind}", port, array, dims)
            except RuntimeInputError as error:
                raise SelfTestError(f"self-test of {bundle.manifest.name!r}: {error}") from None
            if not array.ndim or not array.size:
                raise SelfTestError(f"self-test of {bundle.manifest.name!r}: {kind} {name!r} holds no examples")
            if not _is_finite(array):
                raise SelfTestError(f"self-test of {bundle.manifest.name!r}: {kind} {name!r} has values not finite")
    # Shared symbols are checked above; a graph may have fixed or unrelated batch axes.
    rows = {len(array) for array in (*given.values(), *expected.values())}
    if len(rows) != 1:
        raise SelfTestError(f"self-test of {bundle.manifest.name!r}: batches of different sizes {sorted(rows)}")
    return given, expected


def _check_published(runtime: ModelRuntime) -> None:
    present = runtime.parameters()
    for name, published in runtime.bundle.parameters().items():
        if present[name] is not published and not np.array_equal(present[name], published):
            raise RuntimeInputError(
                f"self-test: parameter {name!r} is not the published one; load the bundle without what was learned"
            )


def answer_zeros(runtime: ModelRuntime) -> SelfTestReport:
    """Predict one example of zeros; the answer must be finite and of the declared dtypes and shapes.

    Works for a runtime that has learned. Raises SelfTestError, and what loading the graph raises.
    """
    program = runtime.bundle.program(need_program(runtime.bundle, "predict", "be tested"))
    ports = [port for port in program.inputs if isinstance(port, Example)]
    if not any(isinstance(dim, str) for port in ports for dim in port.shape[1:]):
        sizes: tuple[int, ...] = (1,)
    else:
        # A free length or picture size: with 1 a deep graph may pool to nothing, and 32 may be too many for another.
        sizes = (1, 32)
    for size in sizes:
        zeros = {port.name: np.zeros(one_example(port.shape, size), port.dtype) for port in ports}
        try:
            _predict_checked(runtime, program, zeros)
            break
        except RuntimeProgramError:
            if size == sizes[-1]:
                raise
    return SelfTestReport(vectors=False, examples=_count_rows(zeros.values()), deviations={})


def one_example(shape: tuple[Dim, ...], free: int) -> tuple[int, ...]:
    """The shape of one example where `shape` leaves the batch free; `free` stands for its other free dimensions."""
    return tuple(dim if isinstance(dim, int) else free if axis else 1 for axis, dim in enumerate(shape))


def _predict_checked(runtime: ModelRuntime, program: Program, examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs by name, of the declared dtypes and shapes and finite. Raises SelfTestError."""
    where = f"self-test of {runtime.bundle.manifest.name!r}"
    answers = runtime.predict(examples)
    dims: dict[str, tuple[int, str]] = {}
    inputs: Mapping[str, Port] = {port.name: port for port in program.inputs}
    for name, array in examples.items():
        check_array(where, inputs[name], array, dims)
    for port in program.outputs:
        try:
            check_array("answer", port, answers[port.name], dims)
        except RuntimeInputError as error:
            raise SelfTestError(f"{where}: {error}") from None
        if not _is_finite(answers[port.name]):
            raise SelfTestError(f"{where}: output {port.name!r} ({describe(port)}) has values that are not finite")
    return answers


def _compare(name: str, got: np.ndarray, expected: np.ndarray, test: SelfTest) -> float:
    """The largest absolute deviation. Raises SelfTestError for an element that is further off than allowed."""
    if got.shape != expected.shape:
        raise SelfTestError(f"self-test: output {name!r} has shape {list(got.shape)}, expected {list(expected.shape)}")
    wanted = expected.astype(np.float64)
    # In float64: the difference of unsigned integers would wrap, that of float16 would be rounded.
    deviation = np.abs(got.astype(np.float64) - wanted)
    if expected.dtype.kind in "iu":
        # Large integers that differ may be equal as float64.
        deviation = np.where(got == expected, 0.0, np.maximum(deviation, 1.0))
    allowed = test.atol + test.rtol * np.abs(wanted)
    # Negated, so that NaN counts as wrong.
    wrong = ~(deviation <= allowed)
    if wrong.any():
        worst = np.unravel_index(int(np.where(wrong, deviation - allowed, -np.inf).argmax()), wrong.shape)
        index = ", ".join(str(int(axis)) for axis in worst)
        raise SelfTestError(
            f"self-test: output {name!r} deviates by up to {deviation.max():.6g}; at [{index}] it is "
            f"{float(got[worst]):.8g}, expected {float(expected[worst]):.8g}, allowed deviation {allowed[worst]:.3g} "
            f"(atol {test.atol:g}, rtol {test.rtol:g}); {int(wrong.sum())} of {wrong.size} values are wrong. "
            "Another delegate may help"
        )
    return float(deviation.max())


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _count_rows(arrays: Iterable[np.ndarray]) -> int:
    return max((len(array) for array in arrays if array.ndim), default=0)
