"""The model card: what a model is for, what it was trained on and how good it is, as `card.json` in its bundle.

The manifest has the file's digest, so the publisher's signature covers the card. Nothing acts on it: it is for people
who decide whether they use the model (after Mitchell et al. 2019, "Model Cards for Model Reporting").
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from archipel.errors import CardError

CARD_FILE = "card.json"
CARD_FORMAT = 1
MAX_CARD_BYTES = 64 << 10
MAX_TEXT = 4096
"""Characters of one text."""
MAX_ENTRIES = 64
"""Data sets, metrics or references."""
BEFORE_COMPRESSION = ", before compression"
"""The end of a metric's `data` where the model was made smaller after it was measured."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class CardData(_Strict, frozen=True, kw_only=True):
    """A data set, with its licence and where it is from.

    Arguments:
        name: what the data set is called, with its version.
        use: what it was for.
        licence: its SPDX identifier where there is one, such as "CC-BY-4.0"; otherwise in words.
        source: an address or a citation.
        examples: how many were used; 0: not stated.

    Example:
        CardData(name="MNIST", licence="CC-BY-SA-3.0", examples=60_000)
    """

    name: str
    use: Literal["training", "validation", "test"] = "training"
    licence: str = ""
    source: str = ""
    examples: int = 0


class CardMetric(_Strict, frozen=True, kw_only=True):
    """A measured number: `name` over `examples` examples of `data` is `value`.

    Arguments:
        name: such as "accuracy", in the field's terms; shares are from 0 to 1.
        value: a finite number.
        data: the data set that it was measured on, of which the model has seen nothing unless the name says so.
        examples: how many.
        command: what shows the number again.

    Example:
        CardMetric(name="accuracy", value=0.989, data="MNIST test", examples=10_000)
    """

    name: str
    value: float
    data: str
    examples: int
    command: str = ""


class CardPrivacy(_Strict, frozen=True, kw_only=True):
    """What the training tells about one unit, such as a device: (`epsilon`, `delta`)-differential privacy.

    Arguments:
        epsilon, delta: the bound, by `accountant`, of all that was released.
        unit: whose data are protected.
        sampling: what was assumed of who is in a round.
        trust: who sees more than the bound allows.
        covers: what the bound is about, and what not.
        accountant: by which rules it was computed.
        releases: how many noisy sums it covers.
        source: who states it, and whether anybody can check it.

    Example:
        CardPrivacy(
            epsilon=2.0, delta=1e-6, unit="one device", sampling="none", trust="the server sees sums without noise",
            covers="the weights of all rounds", source="the publisher states it"
        )
    """

    epsilon: float
    delta: float
    unit: str
    sampling: str
    trust: str
    covers: str
    source: str
    accountant: str = ""
    releases: int = 0


class ModelCard(_Strict, frozen=True, kw_only=True):
    """What people should know of a model before they use it. Texts may have several lines.

    Arguments:
        name: of the model.
        description: what it is.
        task: such as "image classification".
        intended_use: for what and for whom it is made.
        limits: where it fails or must not be used.
        data: the data sets that it was trained, validated and tested on.
        metrics: what was measured.
        privacy: what training told about the people or devices whose data it used; empty: no bound is stated.
        recipe: how it was trained: a command, or the text of its configuration.
        parameters: how many numbers training moves; 0: `convert` counts them.
        licence: of the weights.
        references: papers and addresses.
        contact: who answers questions.
        format: of the card.

    Example:
        card = ModelCard(name="digits", description="Digits on pictures of 28x28.", task="image classification")
    """

    name: str
    description: str
    task: str
    intended_use: str = ""
    limits: str = ""
    data: tuple[CardData, ...] = ()
    metrics: tuple[CardMetric, ...] = ()
    privacy: tuple[CardPrivacy, ...] = ()
    recipe: str = ""
    parameters: int = 0
    licence: str = ""
    references: tuple[str, ...] = ()
    contact: str = ""
    format: int = CARD_FORMAT


class _Header(msgspec.Struct):
    format: int = CARD_FORMAT


_DECODER = msgspec.json.Decoder(ModelCard)
_HEADER_DECODER = msgspec.json.Decoder(_Header)
_ENCODER = msgspec.json.Encoder(order="sorted")


def encode_card(card: ModelCard) -> bytes:
    """The card in canonical JSON: keys sorted, no white space, default values left out. Raises CardError.

    Example:
        data = encode_card(ModelCard(name="digits", description="Digits.", task="classification"))
        assert decode_card(data).name == "digits"
    """
    try:
        data = _ENCODER.encode(card)
    except UnicodeEncodeError:  # half of a surrogate pair, which Python's strings can hold
        raise CardError("card: a text is no Unicode text") from None
    # A struct that Python code has made is not checked until it is decoded: JSON has neither NaN nor infinity.
    return _ENCODER.encode(decode_card(data))


def decode_card(data: bytes) -> ModelCard:
    """Decode and check a card. Raises a CardError that says what is wrong, and where.

    Example:
        card = decode_card(encode_card(ModelCard(name="digits", description="Digits.", task="classification")))
    """
    if len(data) > MAX_CARD_BYTES:
        raise CardError(f"card: {len(data)} bytes, the limit is {MAX_CARD_BYTES}")
    try:
        # The format alone first: a card of a later format must say so, and not fail at a field that is unknown here.
        header = _HEADER_DECODER.decode(data)
        _check_format(header.format)
        card = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CardError(f"card: {error}") from None
    _validate(card)
    return card


def parse_card(text: str) -> ModelCard:
    """The card in a TOML text: the fields of ModelCard, with [[data]], [[metrics]] and [[privacy]] tables.

    Raises CardError.

    Example:
        card = parse_card(Path("card.toml").read_text(encoding="utf-8"))
    """
    if len(text) > MAX_CARD_BYTES:
        raise CardError(f"card: {len(text)} characters, the limit is {MAX_CARD_BYTES}")
    try:
        fields: dict[str, Any] = tomllib.loads(text)
        _check_format(fields.get("format", CARD_FORMAT))
        card = msgspec.convert(fields, ModelCard)
    except (ValueError, RecursionError) as error:  # of TOML, of msgspec, or of a number with thousands of digits
        raise CardError(f"card: {error}") from None
    return decode_card(encode_card(card))


def format_card(card: ModelCard) -> str:
    """The card as a TOML text, which `parse_card` reads. Raises CardError.

    Example:
        text = format_card(ModelCard(name="digits", description="Digits.", task="classification"))
    """
    fields = json.loads(encode_card(card))
    tables = {name: value for name, value in fields.items() if isinstance(value, list) and isinstance(value[0], dict)}
    lines = [_setting(name, value) for name, value in fields.items() if name not in tables]
    for name, rows in tables.items():
        for row in rows:
            lines += ["", f"[[{name}]]", *(_setting(each, value) for each, value in row.items())]
    return "\n".join(lines) + "\n"


def _setting(name: str, value: object) -> str:
    # Numbers, and texts and lists of texts with printable characters alone, are written alike in JSON and TOML.
    return f"{name} = {json.dumps(value, ensure_ascii=False)}"


def mark_compressed(card: ModelCard) -> ModelCard:
    """The card of a model that was made smaller: its metrics say that they are from before that."""
    marked = tuple(
        metric
        if metric.data.endswith(BEFORE_COMPRESSION)
        else msgspec.structs.replace(
            metric, data=metric.data[: MAX_TEXT - len(BEFORE_COMPRESSION)] + BEFORE_COMPRESSION
        )
        for metric in card.metrics
    )
    return msgspec.structs.replace(card, metrics=marked)


def _check_format(found: object) -> None:
    if found != CARD_FORMAT:
        raise CardError(f"card: format {found!r}, this installation reads format {CARD_FORMAT}; update archipel")


def _validate(card: ModelCard) -> None:
    for where, text in _texts(card):
        if len(text) > MAX_TEXT:
            raise CardError(f"card: {where} has {len(text)} characters, the limit is {MAX_TEXT}")
        # A card is shown on terminals and pages: no escape sequences, and nothing that turns text round.
        if wrong := next((c for line in text.split("\n") for c in line if not c.isprintable()), None):
            raise CardError(f"card: {where} has U+{ord(wrong):04X}; leave only printable characters and line ends")
    for where, text in (("name", card.name), ("description", card.description), ("task", card.task)):
        if not text.strip():
            raise CardError(f"card: {where} is empty")
    for where, entries in (
        ("data", card.data), ("metrics", card.metrics), ("privacy", card.privacy), ("references", card.references),
    ):  # fmt: skip
        if len(entries) > MAX_ENTRIES:
            raise CardError(f"card: {len(entries)} {where}, the limit is {MAX_ENTRIES}")
    counts = [("parameters", card.parameters)]
    counts += [(f"data[{i}].examples", each.examples) for i, each in enumerate(card.data)]
    counts += [(f"metrics[{i}].examples", each.examples) for i, each in enumerate(card.metrics)]
    counts += [(f"privacy[{i}].releases", each.releases) for i, each in enumerate(card.privacy)]
    for where, count in counts:
        if not 0 <= count < 2**53:
            raise CardError(f"card: {where} is {count}, expected 0 to 2^53")
    for i, stated in enumerate(card.privacy):
        if not (0 <= stated.epsilon < math.inf and 0 < stated.delta < 1):
            raise CardError(
                f"card: privacy[{i}] has epsilon {stated.epsilon} and delta {stated.delta}, expected a number from 0 "
                "on, and one between 0 and 1"
            )


def _texts(part: msgspec.Struct, where: str = "") -> Iterator[tuple[str, str]]:
    for field in part.__struct_fields__:
        value = getattr(part, field)
        if isinstance(value, str):
            yield f"{where}{field}", value
        elif isinstance(value, tuple):
            for i, each in enumerate(value):
                if isinstance(each, msgspec.Struct):
                    yield from _texts(each, f"{where}{field}[{i}].")
                else:
                    yield f"{where}{field}[{i}]", each
