"""The device's side of update compression, as nodes of `finish`: outputs that carry the changes of all parameters.

`top_k` and `random_k` send a share of the elements. What they leave out stays on the device and is added to its next
change (error feedback: Seide et al. 2014; Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with memory"):

    wanted = change + kept;   sent = elements of wanted, shortened to the clip;   kept = wanted - sent

with the change clipped and weighted. Rounding and shortening are made up for in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from archipel.bundle.roles import Largest, Update
from archipel.errors import ConversionError
from archipel.strategies.program import device_state
from archipel.strategies.update_compression.factored import upload_factored
from archipel.strategies.update_compression.rotated import Rotated
from archipel.strategies.update_compression.shortening import add_shortened

if TYPE_CHECKING:
    from archipel.strategies.device import LocalTraining, Upload, Weighting
    from archipel.strategies.program import ProgramGraph


def upload_packed(
    graph: ProgramGraph,
    local: LocalTraining,
    upload: Upload,
    changes: Sequence[str],
    weighting: Weighting,
    *,
    feedback: bool = False,
) -> str | None:
    """Add the output that carries all changes, or one for each parameter.

    Arguments:
        graph: of `finish`, with the round's clip under its own name `clip`, and `weight` where changes are weighted.
        local: whose parameters changed.
        upload: how.
        changes: the names of the clipped and weighted changes, in the order of the parameters.
        weighting: of the changes.
        feedback: whether what a round leaves out may be sent in a later one.

    Returns the factor that shortened what is sent to the clip; None where nothing of it can be longer.

    Raises ConversionError where the compression needs feedback.
    """
    if upload.compress == "rotation":
        Rotated(graph, local, upload, weighting).upload_all(_add_flat(graph, changes))
        return None
    if not feedback:
        raise ConversionError(
            f"strategy {upload.strategy!r}: compress {upload.compress!r} sends a part of a change in a later round, "
            "and what this strategy makes of a change counts for its own round only; use compress 'rotation'"
        )
    if upload.compress == "low_rank":
        return upload_factored(graph, local, upload, changes, weighting)
    size = sum(array.size for array in local.parameters.values())
    flat = _add_flat(graph, changes)
    count = min(max(round(upload.share * size), 1), size)
    state = graph.own("packed/kept")
    kept = graph.input(device_state(state, state, (size,)))
    wanted = graph.node("Add", [flat, kept], graph.own("packed/wanted"))
    if upload.compress == "top_k":
        sent, shrink = _upload_largest(graph, local, upload, weighting, wanted, count)
    else:
        sent, shrink = Rotated(graph, local, upload, weighting, taken=count).upload_taken(wanted)
    following = graph.node("Sub", [wanted, sent], graph.own("packed/kept.next"))
    graph.output(device_state(following, state, (size,)))
    return shrink


def _upload_largest(
    graph: ProgramGraph, local: LocalTraining, upload: Upload, weighting: Weighting, wanted: str, count: int
) -> tuple[str, str]:
    """Add the output. Returns the names of what is sent, and of the factor that shortened it."""
    sizes = graph.node("Abs", [wanted], graph.own("packed/sizes"))
    places = graph.largest(sizes, count, graph.own("packed/places"))
    chosen = graph.node("Gather", [wanted, places], graph.own("packed/chosen"))
    chosen, shrink = add_shortened(graph, chosen, weighting)
    size = sum(array.size for array in local.parameters.values())
    nothing = graph.array(graph.own("packed/nothing"), np.zeros(size, np.float32))
    sent = graph.node("ScatterElements", [nothing, places, chosen], graph.own("packed.update"))
    graph.output(
        Update(
            name=sent, tensor=graph.own("packed"), dtype="float32", shape=(size,), kind="delta", weighting=weighting,
            range=upload.range, bits=upload.other_bits, clip=upload.bound,
            carries=Largest(parameters=tuple(local.parameters), most=count),
        )
    )  # fmt: skip
    return sent, shrink


def _add_flat(graph: ProgramGraph, changes: Sequence[str]) -> str:
    shape = graph.array(graph.own("packed/flat"), np.array([-1]))
    flat = [graph.node("Reshape", [change, shape], f"{change}.flat") for change in changes]
    return graph.node("Concat", flat, graph.own("packed/joined"), axis=0)
