"""The options of `archipel convert` for who may use a bundle, until when, and which bundles it replaces."""

from __future__ import annotations

import time
from dataclasses import dataclass

import click
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel.cli.input_output.option_group import option_group
from archipel.converter import Signing
from archipel.converter.options import DAY, VALID_DAYS


@dataclass(frozen=True)
class ValidityOptions:
    """Which devices may use the bundle, until when, and which bundles it replaces."""

    populations: tuple[str, ...]
    valid_days: int
    sequence: int
    parent: str | None

    def signing(self, key: Ed25519PrivateKey) -> Signing:
        """The same for `convert`, with the publisher's key. Raises ConversionError."""
        # A whole number of days, so that bundles that are made on one day are the same.
        end = (int(time.time()) // DAY + self.valid_days) * DAY if self.valid_days else 0
        return Signing(key, sequence=self.sequence, not_after=end, populations=self.populations, parent=self.parent)


validity_options = option_group(
    "validity",
    ValidityOptions,
    click.option(
        "--population",
        "populations",
        multiple=True,
        help="A population that may use it; may be given several times. Default: any.",
    ),
    click.option("--valid-days", type=click.IntRange(0, 36500), default=VALID_DAYS, show_default=True,
                 help="How many days devices train with it and adopt it; predicting has no end. 0: no end."),
    click.option("--sequence", type=click.IntRange(0), default=0, show_default=True,
                 help="A greater number ends the use of all bundles of this name with a smaller one."),
    click.option("--parent", metavar="DIGEST", help="The digest of the bundle that this one was made from, for its "
                 "lineage; `archipel inspect` shows it."),
)  # fmt: skip
