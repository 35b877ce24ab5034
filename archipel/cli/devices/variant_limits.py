"""The options with which a device's owner bounds the variant of a release that the device takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from archipel.bundle.release import is_release
from archipel.cli.input_output.option_group import option_group
from archipel.cli.input_output.publisher_keys import remedy_of, trusted_keys
from archipel.errors import CommandError
from archipel.lite_runtime import Choice, choose

_POSITIVE = click.IntRange(1)


@dataclass(frozen=True)
class VariantLimits:
    """`max_latency` is in milliseconds, the others are bytes."""

    max_bytes: int | None
    max_memory: int | None
    max_latency: float | None

    def choose(
        self,
        path: Path,
        key_files: Sequence[Path],
        folder: Path,
        *,
        threads: int = 1,
        delegates: Sequence[str] = (),
        allow_development: bool,
    ) -> Choice | None:
        """The variant to take where `path` is a release, which is unpacked below `folder`; None for anything else.

        Raises CommandError for limits without a release, RuntimeLimitError where no variant fits, BundleError.
        """
        if not is_release(path):
            given = [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]
            if given:
                raise CommandError(
                    f"{path}: not a release, so there is nothing to choose; leave out {', '.join(given)}"
                )
            return None
        keys = trusted_keys(path, key_files)
        with remedy_of(key_files):
            return choose(
                path,
                keys,
                max_bytes=self.max_bytes,
                max_memory=self.max_memory,
                max_latency=None if self.max_latency is None else self.max_latency / 1000,
                threads=threads,
                delegates=list(delegates) or "auto",
                cache=folder,
                allow_development=allow_development,
            )


variant_limits = option_group(
    "limits",
    VariantLimits,
    click.option("--max-bytes", type=_POSITIVE, metavar="BYTES", help="Of a release: largest file of a variant."),
    click.option("--max-memory", type=_POSITIVE, metavar="BYTES",
                 help="Of a release: most memory of one prediction, as signed; the runtime comes on top."),
    click.option("--max-latency", type=click.FloatRange(0, min_open=True), metavar="MS",
                 help="Of a release: most milliseconds of one prediction, measured here."),
)  # fmt: skip
