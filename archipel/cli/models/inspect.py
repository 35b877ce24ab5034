"""`archipel inspect`: what is in a bundle or an ONNX file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy as np

from archipel.bundle import Bundle, Program
from archipel.bundle.graphs import WireError
from archipel.bundle.graphs.precision import graph_precision
from archipel.bundle.reader import BundleContents
from archipel.bundle.release import is_release
from archipel.bundle.roles import Parameter, role_of
from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.models.bundles import is_bundle, open_unverified, open_verified, read_program
from archipel.cli.models.convert.notes import made_by
from archipel.cli.models.inspect_text import bundle_text, onnx_text
from archipel.cli.models.releases import show_release
from archipel.errors import ArchipelError, BundleError, CommandError
from archipel.lite_runtime.self_test import count_examples

if TYPE_CHECKING:
    from archipel.graph import Model


@click.command()
@click.argument("source", metavar="BUNDLE|RELEASE|ONNX", type=click.Path(path_type=Path))
@keys_for_bundles
@click.option("--unverified", is_flag=True, help="Show a bundle without verifying it; do not rely on anything in it.")
@click.option(
    "--layers", is_flag=True, help="List every layer with its FLOPs, their share, and zeros among its weights."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
def inspect(source: Path, key_files: tuple[Path, ...], unverified: bool, layers: bool, as_json: bool) -> None:
    """Show the contents of a bundle (a file or a folder), of a release, or of an ONNX file.

    \b
    archipel inspect digits.bundle --key publisher.pub
    archipel inspect digits.bundle --key publisher.pub --layers
    archipel inspect model.onnx --json

    The command verifies a bundle first. It shows programs with their inputs, outputs and roles, parameters, FLOPs,
    bytes, zeros, lineage, limits, self-test and privacy. FLOPs are for one example, two for each multiplication with
    its addition; they need the extra `convert`. An ONNX file always needs that extra, and no key. Of a release it shows
    a table of the variants.
    """
    if is_release(source):
        if unverified or layers:
            raise CommandError(f"{source}: --unverified and --layers are for one bundle; name one of the release's")
        show_release(source, key_files, as_json)
        return
    if not is_bundle(source):
        if key_files or unverified:
            raise CommandError(f"{source}: an ONNX file has no signature; leave out --key and --unverified")
        facts = onnx_facts(source)
        click.echo(json.dumps(facts, allow_nan=False) if as_json else onnx_text(facts, layers))
        return
    if unverified and key_files:
        raise CommandError("--unverified and --key: give one of the two")
    with tempfile.TemporaryDirectory() as folder:
        bundle: BundleContents = (
            open_unverified(source, folder) if unverified else open_verified(source, key_files, folder)
        )
        if unverified:
            click.echo(f"archipel: {source} is NOT verified: anyone may have written it", err=True)
        facts = bundle_facts(bundle)
        click.echo(json.dumps(facts, allow_nan=False) if as_json else bundle_text(facts, layers))


def bundle_facts(bundle: BundleContents) -> dict[str, Any]:
    """Everything that the command shows of a bundle, as values for JSON.

    A program whose graph cannot be read has its error under "problem".
    """
    manifest = bundle.manifest
    files = {name: (bundle.folder / name).stat().st_size for name in sorted(_file_names(bundle))}
    graphs = {name: _program_graph(bundle, name) for name in sorted(manifest.programs)}
    predict = next((graphs[name] for name, program in manifest.programs.items() if program.kind == "predict"), {})
    trained = _trained(bundle)
    # All tensors of the weights file: parameters, and also constants of graphs.
    dtypes: dict[str, int] = {}
    for array in bundle.tensors.values():
        dtypes[array.dtype.name] = dtypes.get(array.dtype.name, 0) + array.nbytes
    parameters = [
        {
            "name": spec.name,
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "bytes": spec.nbytes,
            "trainable": spec.name in trained,
            "sparsity": _zero_share([bundle.tensors[spec.name]]) if spec.name in bundle.tensors else None,
        }
        for spec in manifest.parameters
    ]
    return {
        "kind": "bundle",
        "name": manifest.name,
        "format": manifest.format,
        "digest": bundle.digest,
        "verified": isinstance(bundle, Bundle),
        "strategy": manifest.strategy,
        "not_after": manifest.not_after,
        "populations": list(manifest.populations),
        "sequence": manifest.sequence,
        "schedule": msgspec.to_builtins(manifest.schedule),
        "privacy": msgspec.structs.asdict(manifest.privacy),
        "limits": msgspec.to_builtins(manifest.limits),
        "lineage": {
            "parent": manifest.lineage.parent,
            "recipe": list(manifest.lineage.recipe),
            "metrics": dict(manifest.lineage.metrics),
        },
        **_made_by(bundle),
        "self_test": _self_test(bundle),
        "source": manifest.source or None,
        **_card(bundle),
        "programs": [
            {
                **program_facts(name, program, files.get(program.file, 0), _precision(bundle, program)),
                **graphs[name],
            }
            for name, program in sorted(manifest.programs.items())
        ],
        "parameters": parameters,
        "sparsity": {
            "parameters": _zero_share(
                [bundle.tensors[p.name] for p in manifest.parameters if p.name in bundle.tensors]
            ),
            "predict": predict.get("sparsity"),
        },
        "files": files,
        "bytes": sum(files.values()),
        "weight_bytes": dict(sorted(dtypes.items())),
    }


def _card(bundle: BundleContents) -> dict[str, Any]:
    """The card; None without one, and its error under "card_problem" where it cannot be read."""
    try:
        return {"card": None if bundle.card is None else msgspec.to_builtins(bundle.card)}
    except BundleError as error:
        return {"card": None, "card_problem": str(error)}


def onnx_facts(path: Path) -> dict[str, Any]:
    """Everything that the command shows of an ONNX file, as values for JSON.

    Raises MissingExtraError, ModelImportError.
    """
    from archipel.graph.parameters import trainable_names  # first: its error names the extra that is missing
    from archipel.compression.stored import read_stored  # isort: skip
    from archipel.graph.model_card import card_of
    from archipel.preprocessing import describe

    model = read_stored(path)
    parameters, trainable = model.parameters, set(trainable_names(model.ir, "*"))
    ports = {
        side: [{"name": info.name, "dtype": info.dtype, "shape": list(info.shape)} for info in infos]
        for side, infos in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    graph, card = _graph(model), card_of(model.ir)
    return {
        "kind": "onnx",
        "name": path.name,
        "bytes": path.stat().st_size,
        "ir_version": model.ir.ir_version,
        "opsets": dict(model.ir.graph.opset_imports),
        "producer": " ".join(filter(None, (model.ir.producer_name, model.ir.producer_version))),
        "card": None if card is None else msgspec.to_builtins(card),
        **ports,
        **{name: value for name, value in graph.items() if name != "dtypes"},
        "preprocessing": describe(model),
        "peak_bytes": _peak_bytes(model),
        "parameters": [
            {
                "name": name,
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "bytes": array.nbytes,
                "trainable": name in trainable,
                "sparsity": _zero_share([array]),
            }
            for name, array in parameters.items()
        ],
        "sparsity": {"parameters": _zero_share(list(parameters.values())), "predict": graph["sparsity"]},
        "weight_bytes": graph["dtypes"],
    }


def _made_by(bundle: BundleContents) -> dict[str, Any]:
    try:
        return made_by(bundle)
    except (ArchipelError, StopIteration):  # without the extra `convert`, or without `predict`
        return {"import": None, "conversion": [], "preprocessing": []}


def _file_names(bundle: BundleContents) -> list[str]:
    return [path.name for path in bundle.folder.iterdir() if path.is_file()]


_FORMS = {"predict": "deployed", "features": "training form", "train": "training form"}
"""Of programs with the model in them: what devices answer with, and the float form of it that they train."""


def _precision(bundle: BundleContents, program: Program) -> str | None:
    # An unverified bundle may lack the file, or have any bytes in it.
    try:
        return graph_precision((bundle.folder / program.file).read_bytes())
    except (OSError, WireError, KeyError):
        return None


def program_facts(name: str, program: Program, size: int, precision: str | None = None) -> dict[str, Any]:
    """A program with its inputs and outputs, as values for JSON; `size` is that of its file in bytes."""
    return {
        "name": name,
        "kind": program.kind,
        "form": _FORMS.get(str(program.kind)),
        "precision": precision,
        "file": program.file,
        "bytes": size,
        "steps": program.steps,
        "inputs": [{"role": role_of(port), **_without_role(port)} for port in program.inputs],
        "outputs": [{"role": role_of(port), **_without_role(port)} for port in program.outputs],
    }


def _without_role(port: Any) -> Mapping[str, Any]:
    return {**msgspec.to_builtins(port), "shape": list(port.shape)}


def _program_graph(bundle: BundleContents, name: str) -> dict[str, Any]:
    # Without the extra `convert`, too, the rest of the bundle is shown.
    try:
        return _graph(read_program(bundle, name))
    except ArchipelError as error:
        return {"problem": str(error)}


def _graph(model: Model) -> dict[str, Any]:
    from archipel.cli.models.graph_facts import graph_facts

    facts = graph_facts(model)
    return {
        "nodes": facts.nodes,
        "operators": facts.operators,
        "flops_per_example": facts.flops,
        "layers": [
            {
                "node": layer.node,
                "operator": layer.operator,
                "weight": layer.weight,
                "flops": layer.flops,
                "share": layer.share,
                "sparsity": layer.sparsity,
            }
            for layer in facts.layers
        ],
        "sparsity": facts.sparsity,
        "dtypes": facts.dtypes,
        "problem": facts.problem,
    }


def _peak_bytes(model: Model) -> int | None:
    from archipel.converter.limits import compute_limits
    from archipel.errors import ConversionError

    try:
        return compute_limits({"predict": model}, 1).peak_bytes
    except ConversionError:
        return None


def _trained(bundle: BundleContents) -> set[str]:
    return {
        port.tensor
        for program in bundle.manifest.programs.values()
        if program.kind == "train"
        for port in program.outputs
        if isinstance(port, Parameter)
    }


def _self_test(bundle: BundleContents) -> dict[str, Any] | None:
    test = bundle.manifest.self_test
    if test is None:
        return None
    try:
        examples = count_examples(bundle.folder / test.file)
    except (OSError, ArchipelError):  # an unverified bundle may have any bytes in it
        examples = 0
    return {
        "file": test.file,
        "program": "predict",
        "examples": examples,
        "source": test.source,
        "rtol": test.rtol,
        "atol": test.atol,
    }


def _zero_share(arrays: list[np.ndarray]) -> float | None:
    size = sum(array.size for array in arrays)
    return 1 - sum(int(np.count_nonzero(array)) for array in arrays) / size if size else None
