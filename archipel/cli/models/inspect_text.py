"""The facts that `archipel inspect` has found, as text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from archipel.cli.input_output.card import card_lines
from archipel.cli.input_output.tables import table
from archipel.cli.models.convert.notes import note_lines, preparation_lines
from archipel.cli.models.update_text import update_lines
from archipel.lite_runtime.self_test import describe_vectors
from archipel.protocol.messages import over_neighbours
from archipel.protocol.moments import moment

_OPERATORS = 8


def bundle_text(facts: Mapping[str, Any], layers: bool) -> str:
    """The result of `bundle_facts` as text; `layers` lists the layers of every program."""
    limits, privacy, lineage, test = (facts[name] for name in ("limits", "privacy", "lineage", "self_test"))
    lines = [
        f"{facts['name']}  format {facts['format']}  digest {facts['digest']}" + ("" if facts["verified"] else
        "  NOT VERIFIED"),
        f"strategy {facts['strategy'] or '-'}; privacy {', '.join(privacy['modes'])}, cohort of at least "
        f"{privacy['min_cohort']} and {privacy['colluders']:.3g} of it colluders, threshold {privacy['threshold']:g}, "
        f"clip at most {privacy['max_clip']:g}, {privacy['max_bits']} bits",
        *_protocols(privacy),
        f"trained and adopted: {_until(facts['not_after'])}; {', '.join(facts['populations']) or 'any population'}; "
        f"sequence {facts['sequence']}",
        f"queries: {privacy['queries']} in {privacy['query_days']} days, each of at least "
        f"{privacy['min_contributors']} devices with examples",
        f"limits: peak {limits['peak_bytes']:,} bytes; {limits['flops_per_example']:,} FLOPs per example; "
        f"upload at most {limits['upload_bytes']:,} bytes",
    ]  # fmt: skip
    lines += [f"schedule: {_phase(phase)}" for phase in facts["schedule"]]
    lines += update_lines(facts)
    lines.append(
        "self-test: none" if test is None else
        f"self-test: {describe_vectors(test['examples'], test['source'])}, within {test['atol']:.3g} + "
        f"{test['rtol']:.3g} |expected|; {test['file']}"
    )  # fmt: skip
    if facts["source"]:
        lines.append(f"source: {facts['source']}, the float model as it was converted, for `archipel export`")
    lines.append(f"parent: {lineage['parent'] or '-'}")
    lines += [f"note: {note}" for note in note_lines(facts)]
    lines += [f"recipe: {part}" for part in lineage["recipe"]]
    lines += [f"metric: {name} {value:.6g}" for name, value in sorted(lineage["metrics"].items())]
    if facts.get("card_problem"):
        lines.append(f"card: cannot be shown: {facts['card_problem']}")
    lines += card_lines(facts["card"]) if facts["card"] else []
    for program in facts["programs"]:
        repeated = f", {program['steps']} steps at once" if program["steps"] > 1 else ""
        form = f"; {program['form']}, {program['precision']}" if program["form"] else ""
        head = f"{program['name']} ({program['kind']}, {program['bytes']:,} bytes{repeated}{form})"
        lines += ["", head, *_graph(program)]
        for arrow, side in (("<-", "inputs"), ("->", "outputs")):
            lines += [f"  {arrow} {port['role']:<15}{_port(port)}" for port in program[side]]
        lines += _layers(program, layers)
    return "\n".join([*lines, "", *_weights(facts), *_files(facts["files"], facts["bytes"])])


def onnx_text(facts: Mapping[str, Any], layers: bool) -> str:
    """The result of `onnx_facts` as text; `layers` lists the layers."""
    opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in facts["opsets"].items())
    lines = [f"{facts['name']}  {facts['bytes']:,} bytes  IR {facts['ir_version']}, opset {opsets}"]
    if facts["producer"]:
        lines.append(f"made by {facts['producer']}")
    if facts["peak_bytes"] is not None:
        lines.append(f"peak {facts['peak_bytes']:,} bytes of weights and values for one example")
    lines += card_lines(facts["card"]) if facts["card"] else []
    lines += [*preparation_lines(facts["preprocessing"]), *_graph(facts)]
    for arrow, side in (("<-", "inputs"), ("->", "outputs")):
        lines += [f"  {arrow} {_port(port)}" for port in facts[side]]
    return "\n".join([*lines, *_layers(facts, layers), "", *_weights(facts)])


def _until(not_after: int) -> str:
    # The end is for training and adoption: a bundle predicts for ever.
    if not not_after:
        return "without end"
    over = " (that is over; it still predicts)" if not_after < time.time() else ""
    return f"until {moment(not_after)}{over}"


def _protocols(privacy: Mapping[str, Any]) -> list[str]:
    """Lines where secure rounds may be over neighbours, and where devices add noise themselves."""
    lines = []
    if any(over_neighbours(protocol) for protocol in privacy["protocols"]):
        lines.append(
            f"secure rounds: {' or '.join(privacy['protocols'])}; over neighbours {privacy['dropouts']:.3g} may leave, "
            f"with a {privacy['server']} server"
        )
    if privacy["noise_multiplier"]:
        lines.append(f"noise: devices add it themselves, with a multiplier of {privacy['noise_multiplier']:g} or more")
    return lines


def _phase(phase: Mapping[str, Any]) -> str:
    # A phase has either epochs or steps; the other one is None.
    unit = "epochs" if phase.get("epochs") is not None else "steps"
    length = f"{phase[unit]} {unit if phase[unit] != 1 else unit[:-1]}"
    return f"{phase['program']}, {length}, batches of {phase['batch_size']}"


def _port(port: Mapping[str, Any]) -> str:
    return f"{port['name']}: {port['dtype']}[{', '.join(map(str, port['shape']))}]"


def _graph(facts: Mapping[str, Any]) -> list[str]:
    lines = []
    if "nodes" in facts:
        flops = facts["flops_per_example"]
        common = [f"{name} {count}" for name, count in list(facts["operators"].items())[:_OPERATORS]]
        more = [f"{len(facts['operators']) - _OPERATORS} others"] if len(facts["operators"]) > _OPERATORS else []
        # FLOPs have no bound where a loop's number of iterations is computed.
        work = "FLOPs without a bound" if flops is None else f"{flops:,} FLOPs per example"
        lines.append(f"  {work}; {facts['nodes']} nodes: {', '.join(common + more)}")
    if facts.get("problem"):
        lines.append(f"  graph: {facts['problem']}")
    return lines


def _layers(facts: Mapping[str, Any], shown: bool) -> list[str]:
    if not shown or not facts.get("layers"):
        return []
    rows = [
        (f"{layer['flops']:,}", f"{layer['share']:.1%}", _percent(layer["sparsity"]), layer["operator"],
         layer["weight"] or layer["node"])
        for layer in facts["layers"]
    ]  # fmt: skip
    return _indented(table(("FLOPs", "share", "zeros", "operator", "weight"), rows, numbers=3))


def _weights(facts: Mapping[str, Any]) -> list[str]:
    rows = [
        (f"{each['bytes']:,}", _percent(each["sparsity"]), "yes" if each["trainable"] else "no",
         f"{each['dtype']}[{', '.join(map(str, each['shape']))}]", each["name"])
        for each in facts["parameters"]
    ]  # fmt: skip
    total = sum(each["bytes"] for each in facts["parameters"])
    zeros = facts["sparsity"]
    lines = [f"{len(rows)} parameters, {total:,} bytes, {_percent(zeros['parameters'])} zeros"]
    if rows:
        lines += _indented(table(("bytes", "zeros", "trained", "type", "name"), rows, numbers=2))
    if zeros["predict"] is not None:
        lines.append(f"weights that predict with: {_percent(zeros['predict'])} zeros")
    kinds = ", ".join(f"{dtype} {size:,}" for dtype, size in facts["weight_bytes"].items())
    return [*lines, f"bytes of all tensors by type: {kinds or '-'}"]


def _files(files: Mapping[str, int], total: int) -> list[str]:
    return ["", f"{len(files)} files, {total:,} bytes", *(f"{size:>14,}  {name}" for name, size in files.items())]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]
