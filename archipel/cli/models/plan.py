"""`archipel plan`: predicted time and memory of each way to train a model on several devices."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from archipel.cli.input_output.publisher_keys import keys_for_bundles
from archipel.cli.input_output.sources import open_source


@click.command("plan")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), required=True,
              help="TOML file of the devices: memory, speeds, links.")  # fmt: skip
@click.option("--batch-size", type=click.IntRange(min=1), required=True, help="Examples of a batch, over all devices.")
@click.option("--optimizer", type=click.Choice(["sgd", "momentum", "adam", "adamw"]), default="adam",
              show_default=True, help="Decides what is kept and moved for each parameter.")  # fmt: skip
@click.option("--microbatches", type=click.IntRange(min=1), help="Of a pipeline; otherwise four for each device.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the strategy of each operator.")
@keys_for_bundles
def plan_command(
    source: Path,
    cluster_file: Path,
    batch_size: int,
    optimizer: str,
    microbatches: int | None,
    as_json: bool,
    key_files: tuple[Path, ...],
) -> None:
    """Predict how long a training step of the model in SOURCE takes on several devices, and what memory it needs.

    \b
    archipel plan resnet50.onnx --cluster cluster.toml --batch-size 256

    SOURCE is an ONNX file or a bundle. Each way of sharing the work has a line: ddp, fsdp, tensor, pipeline, hybrid,
    and what auto would do. A way that does not fit is refused, with the reason. Training with parallel = "auto" takes
    the last line. docs/parallel.md says what a cluster file has; a training that is given none measures one.
    """
    from archipel.training.cloud.planner import plan, read_cluster

    with tempfile.TemporaryDirectory() as folder:
        model = open_source(source, key_files, None, folder).model
    found = plan(model, read_cluster(cluster_file), batch_size, optimizer, microbatches)
    click.echo(found.to_json() if as_json else found.table())
