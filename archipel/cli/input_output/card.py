"""Model cards on the command line: the file that `archipel convert --card` reads, and how a card is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from archipel.bundle import ModelCard, parse_card
from archipel.bundle.card import MAX_CARD_BYTES
from archipel.errors import CardError, CommandError

WIDTH = 96
card_option = click.option(
    "--card", "card_file", type=click.Path(path_type=Path), metavar="TOML",
    help="The model card: name, description, task, intended_use, limits, recipe, licence, references and contact, with "
    "[[data]], [[metrics]] and [[privacy]] tables. Default: the one that SOURCE has.",
)  # fmt: skip


def read_card(file: Path | None) -> ModelCard | None:
    """The card in a TOML file, None without a file. Raises CommandError or CardError that name the file; OSError."""
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CARD_BYTES + 1)
        return parse_card(content.decode())
    except UnicodeDecodeError:
        raise CommandError(f"--card {file}: no TOML, which is text in UTF-8") from None
    except CardError as error:
        raise CardError(f"--card {file}: {error}") from None


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """A card, as its fields in JSON, in lines for people."""
    lines = [f"card: {card['name']}, {card['task']}"]
    for field, title in (
        ("description", ""), ("intended_use", "intended use: "), ("limits", "limits: "), ("recipe", "recipe: "),
        ("licence", "licence: "), ("contact", "contact: "),
    ):  # fmt: skip
        if card.get(field):
            lines += _wrapped(title + str(card[field]))
    if card.get("parameters"):
        lines.append(f"  parameters: {card['parameters']:,}")
    for each in card.get("data", []):
        facts = [f"{each['examples']:,} examples"] if each.get("examples") else []
        facts += [each[field] for field in ("licence", "source") if each.get(field)]
        lines += _wrapped(f"{each.get('use', 'training')} data: {'; '.join([each['name'], *facts])}")
    for each in card.get("metrics", []):
        shown = f" (`{each['command']}`)" if each.get("command") else ""
        lines += _wrapped(
            f"measured: {each['name']} {each['value']:.6g} on {each['examples']:,} examples of {each['data']}{shown}"
        )
    for each in card.get("privacy", []):
        counted = f" after {each['releases']:,} noisy sums" if each.get("releases") else ""
        lines += _wrapped(f"privacy: epsilon {each['epsilon']:.4g} at delta {each['delta']:g}{counted}")
        lines += [
            line
            for field in ("source", "unit", "sampling", "trust", "covers", "accountant")
            if each.get(field)
            for line in _wrapped(f"  {field}: {each[field]}")
        ]
    for each in card.get("references", []):
        lines += _wrapped(f"see: {each}")
    return lines


def _wrapped(text: str) -> Iterator[str]:
    for line in text.strip().split("\n"):
        yield from textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ") or [""]
