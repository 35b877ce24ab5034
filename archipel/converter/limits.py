"""What the programs need at most, by their graphs alone: bytes alive at once, FLOPs per example, bytes to upload."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import onnx_ir as ir

from archipel.bundle import Limits
from archipel.bundle.roles import Update
from archipel.errors import ConversionError, GraphError
from archipel.graph import Model, flops
from archipel.graph.functions import inline_functions
from archipel.graph.sizes import Sizes
from archipel.graph.walk import bodies, dependencies, last_readers

_UPLOAD_ENTRY_BYTES = 4  # the widest modulus, 32 bits


def compute_limits(programs: Mapping[str, Model], batch_size: int) -> Limits:
    """Bounds over all programs, with every symbolic dimension taken as `batch_size` examples.

    `peak_bytes` counts inputs, weights and the intermediate values that are alive together, in the graph's order; the
    kernels' scratch space and the runtime itself are not included. FLOPs are counted by `archipel.graph.flops`. Raises
    ConversionError for a program without a bound: a Loop that only its condition ends, a value of unknown rank.
    """
    peak = work = entries = 0
    for program in programs.values():
        # What a device needs that has no kernels for functions of the graph.
        inlined = program.copy() if program.ir.functions else program
        inline_functions(inlined.ir)
        with _bounded():
            peak = max(peak, _peak_bytes(inlined.ir.graph, Sizes(inlined.ir, batch_size)))
        work = max(work, flops_per_example(program))
        ports = program.program.outputs if program.kind else ()  # a plain model uploads nothing
        sizes = (math.prod(int(d) for d in port.shape) for port in ports if isinstance(port, Update))
        entries = max(entries, sum(sizes))
    return Limits(peak_bytes=peak, flops_per_example=work, upload_bytes=entries * _UPLOAD_ENTRY_BYTES)


def flops_per_example(program: Model) -> int:
    """Two per multiply-accumulate, for one example of one step. Raises ConversionError for what has no bound."""
    with _bounded():
        return flops.flops_per_example(program)


def flops_per_run(program: Model) -> int:
    """As `flops_per_example`, for one run: all steps, and all examples where their number is fixed."""
    with _bounded():
        return sum(flops.flops(program).values())


@contextmanager
def _bounded() -> Iterator[None]:
    try:
        yield
    except GraphError as error:
        raise ConversionError(f"limits: {error}") from error


def _peak_bytes(graph: ir.Graph, sizes: Sizes) -> int:
    # Inputs and weights belong to the caller, so they stay until the run ends, and so do outputs once they are made.
    always = [*graph.inputs, *graph.initializers.values()]
    last_use = last_readers(graph)
    kept = {*always, *graph.outputs}
    alive = peak = sum(map(sizes.nbytes, always))
    made: set[ir.Value] = set()
    for node in graph:
        results = {value for value in node.outputs if value.name}
        made |= results
        # A kernel reads its inputs while it writes its results, so results are added before inputs are freed.
        alive += sum(map(sizes.nbytes, results))
        peak = max(peak, alive + max((_peak_bytes(body, sizes) for body in bodies(node)), default=0))
        # Of values from around a body (`made` has none of them) the graph outside keeps count.
        ended = {v for v in dependencies(node) if v in made and v not in kept and last_use[v] is node}
        unused = {v for v in results if v not in kept and v not in last_use}
        alive -= sum(map(sizes.nbytes, ended | unused))
    return peak
