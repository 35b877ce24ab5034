"""`archipel export`: what was learned becomes a model file again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.input_output.sources import learned_weights, open_source
from archipel.errors import CommandError


@click.command("export")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="The new file; its ending (.onnx, .safetensors or .pt) says what it is.")  # fmt: skip
@keys_for_bundles
@learned_weights
@click.option("--force", is_flag=True, help="Replace the output where it exists.")
def export_command(source: Path, output: Path, key_files: tuple[Path, ...], weights: Path | None, force: bool) -> None:
    """Write the model in SOURCE, with what it has learned, as a file that other tools read.

    \b
    archipel export digits.bundle --key publisher.pub --weights task.safetensors -o digits.pt
    archipel export mine --key publisher.pub -o mine.onnx

    SOURCE is a bundle, a model that `archipel fit --save` wrote, a slot of a device (a folder with bundle/ in it), or
    an ONNX file. The model has the names, shapes, inputs and outputs of the file that was converted.

    \b
    .onnx         an inference model in float, which ONNX Runtime runs and `archipel convert` reads
    .safetensors  the state_dict of its PyTorch module: safetensors.torch.load_file(FILE)
    .pt           the same for torch.load(FILE, weights_only=True); needs PyTorch

    module.load_state_dict(...) takes it with strict=True.
    """
    from archipel.converter.model_files import export

    if output.exists() and not force:
        raise CommandError(f"{output}: exists already; choose another name, or replace it with --force")
    with tempfile.TemporaryDirectory() as folder:
        model = export(open_source(source, key_files, weights, folder).model, output, force=force)
    parameters = model.parameters
    size = sum(array.size for array in parameters.values())
    click.echo(f"{output}: {output.stat().st_size:,} bytes, {len(parameters)} parameters of {size:,} numbers")
