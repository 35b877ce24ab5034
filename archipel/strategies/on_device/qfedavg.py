"""q-FedAvg (Li et al. 2020, "Fair resource allocation in federated learning", algorithm 2): devices alike in loss.

Devices on which the model is bad count more: the aim is a small sum of F_k^(q + 1) / (q + 1), F_k the loss of device k.
Device half: trains as for federated averaging, and then measures the mean loss F of the received model. With d the
clipped delta and L = 1 / lr, the paper's two uploads divided by L are

    F^q d    and    h = F^q + q L F^(q - 1) |d|^2

Server half: parameters + server_lr * sum of the first / sum of the second. As h is at least F^q, the step is a mean of
deltas no longer than d, with h as the weights: so h is the update's weight entry, and all bounds of weights hold.

The weight has to lie between a smallest and a largest number: F counts as at most `loss_cap`, the unit of weights is
2 loss_cap^q, and a device beyond one unit keeps its direction and counts as one. At least it counts 1 / weight_cap: a
smaller F is raised to where F^q is that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from archipel.bundle import Program
from archipel.errors import ConversionError
from archipel.strategies import averaging
from archipel.strategies.clipping import choose_clip
from archipel.strategies.device import (
    MEASURED_COUNT,
    MEASURED_LOSS,
    DeviceHalf,
    LocalTraining,
    MakeProgram,
    Part,
    Upload,
    check_not_negative,
    check_positive,
)
from archipel.strategies.finish import clip_deltas, report_clipped, upload_deltas, upload_weight
from archipel.strategies.program import ProgramGraph, round_state
from archipel.strategies.running_statistics import upload_statistics

if TYPE_CHECKING:
    import onnx


_SMALLEST = 1e-6


def device(upload: Upload, *, q: float = 1.0, loss_cap: float = 5.0) -> DeviceHalf:
    """`q`: how much a device's loss counts; 0 is federated averaging of devices alike, paper 0.1 to 5. `loss_cap`: the
    largest loss that counts as it is; a model that guesses among n classes has the loss ln n."""
    power = check_not_negative(upload.strategy, "q", q)
    cap = check_positive(upload.strategy, "loss_cap", loss_cap)
    if upload.weighting == "uniform":
        raise ConversionError(
            f"strategy {upload.strategy!r}: weighting='uniform' lets every device weigh 1, but here the loss is the "
            "weight; leave it out, or use fedavg"
        )
    if upload.weight_cap < 2:
        raise ConversionError(f"strategy {upload.strategy!r}: weight_cap must be 2 or more, is {upload.weight_cap}")
    return DeviceHalf(
        parts=(Part(), Part(program="measure", trains="nothing", epochs=1)),
        finish=_finish(upload, power, cap),
        optimizer="momentum",
    )


def _finish(options: Upload, q: float, cap: float) -> MakeProgram:
    def make(local: LocalTraining) -> tuple[onnx.ModelProto, Program]:
        upload = choose_clip(options, local)
        graph = ProgramGraph("finish", upload.strategy)
        shrink = clip_deltas(graph, local, upload)
        norm = graph.node("Min", [graph.own("norm_above_zero"), graph.own("clip")], graph.own("clipped_norm"))
        share, weight = _weigh(graph, local, upload, q, cap, norm)
        factor = graph.node("Mul", [shrink, share], graph.own("factor"))
        graph.node("Identity", [weight], graph.own("weight"))
        upload_deltas(graph, local, upload, factor, upload.weighting)
        upload_statistics(graph, local, upload)
        upload_weight(graph, upload)
        report_clipped(graph, shrink)
        return graph.build()

    return make


def _weigh(
    graph: ProgramGraph, local: LocalTraining, upload: Upload, q: float, cap: float, norm: str
) -> tuple[str, str]:
    """Add F^q and h, both in units of weight, where h is at most 1. Returns their names."""
    lowest = 2.0 / upload.weight_cap
    # Of F / cap. The millionth keeps the quotient below finite where F counts for little.
    floor = max(lowest ** (1 / q), _SMALLEST) if q else _SMALLEST
    labels = graph.node("Max", [_state(graph, MEASURED_COUNT), graph.own("one")], graph.own("labels"))
    loss = graph.node("Div", [_state(graph, MEASURED_LOSS), labels], graph.own("mean_loss"))
    scaled = graph.node("Div", [loss, graph.constant("loss_cap", cap)], graph.own("scaled_loss"))
    kept = graph.node("Clip", [scaled, graph.constant("floor", floor), graph.own("one")], graph.own("loss"))
    power = graph.node("Pow", [kept, graph.constant("q", q)], graph.own("power"))
    half = graph.node("Mul", [power, graph.constant("half", 0.5)], graph.own("half_power"))
    # h / F^q = 1 + q L |d|^2 / F
    square = graph.node("Mul", [norm, norm], graph.own("clipped_square"))
    rate = graph.node("Max", [graph.input(local.hyperparameters["lr"]), graph.own("tiny")], graph.own("rate"))
    curved = graph.node("Div", [square, rate], graph.own("curved"))
    true_loss = graph.node("Mul", [kept, graph.own("loss_cap")], graph.own("counted_loss"))
    quotient = graph.node("Div", [curved, true_loss], graph.own("relative"))
    more = graph.node("Mul", [quotient, graph.own("q")], graph.own("more"))
    ratio = graph.node("Add", [more, graph.own("one")], graph.own("ratio_of_h"))
    weight = graph.node(
        "Min", [graph.node("Mul", [half, ratio], graph.own("h")), graph.own("one")], graph.own("kept_h")
    )
    return graph.node("Div", [weight, graph.own("ratio_of_h")], graph.own("share")), weight


def _state(graph: ProgramGraph, tensor: str) -> str:
    return graph.input(round_state(tensor, ()))


STRATEGY = averaging.strategy("qfedavg", device, asynchronous=False, averages=False)
