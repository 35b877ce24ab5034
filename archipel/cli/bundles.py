"""`archipel inspect` and `archipel verify`: look into a bundle."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from archipel.bundle import Bundle, load_public_key, open_bundle, role_of


def _open(path: Path, key_files: tuple[Path, ...], folder: str) -> Bundle:
    return open_bundle(path, [load_public_key(file) for file in key_files], cache=Path(folder))


_KEYS = click.option(
    "--key",
    "key_files",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="The publisher's public key (FILE.pub of `archipel keys`); may be given several times.",
)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@_KEYS
def verify(bundle: Path, key_files: tuple[Path, ...]) -> None:
    """Check a bundle's signature, digests and layout; exit code 1 says what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        opened = _open(bundle, key_files, folder)
        click.echo(f"{bundle}: good; {opened.manifest.name!r}, digest {opened.digest}")


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@_KEYS
def inspect(bundle: Path, key_files: tuple[Path, ...]) -> None:
    """Show a bundle's programs, roles, parameters and limits, after verifying it."""
    with tempfile.TemporaryDirectory() as folder:
        opened = _open(bundle, key_files, folder)
        manifest = opened.manifest
        click.echo(f"{manifest.name}  format {manifest.format}  digest {opened.digest}")
        click.echo(f"strategy {manifest.strategy or '-'}; privacy {', '.join(manifest.privacy.modes)}, "
                   f"cohort of at least {manifest.privacy.min_cohort}")  # fmt: skip
        limits = manifest.limits
        click.echo(
            f"peak {limits.peak_bytes:,} bytes; {limits.flops_per_example:,} FLOPs per example; "
            f"upload at most {limits.upload_bytes:,} bytes"
        )
        for phase in manifest.schedule:
            length = f"{phase.epochs} epochs" if phase.epochs is not None else f"{phase.steps} steps"
            click.echo(f"schedule: {phase.program}, {length}, batches of {phase.batch_size}")
        for name, program in sorted(manifest.programs.items()):
            size = (opened.folder / program.file).stat().st_size
            click.echo(f"\n{name} ({program.kind}, {size:,} bytes)")
            for arrow, ports in (("<-", program.inputs), ("->", program.outputs)):
                for port in ports:
                    shape = ", ".join(map(str, port.shape))
                    click.echo(f"  {arrow} {role_of(port):<15}{port.name}: {port.dtype}[{shape}]")
        values = sum(spec.nbytes for spec in manifest.parameters)
        click.echo(f"\n{len(manifest.parameters)} parameters, {values:,} bytes")
