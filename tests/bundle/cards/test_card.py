"""Model cards: strict decoding with limits, texts that are safe to show, and a file that the signature covers."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.bundle.card import MAX_CARD_BYTES, MAX_ENTRIES, MAX_TEXT
from archipel.errors import CardError, DigestError, UnsafePathError

CORPUS = Path(__file__).parent / "corpus"
TOML = """
name = "digits"
description = '''Ten digits.
Grey pictures.'''
task = "image classification"
licence = "Apache-2.0"
references = ["LeCun et al. 1998"]
[[data]]
name = "MNIST"
use = "training"
licence = "CC-BY-SA-3.0"
examples = 60000
[[metrics]]
name = "accuracy"
value = 0.97
data = "MNIST, test"
examples = 10000
command = "archipel run digits.bundle --data test.npz"
[[privacy]]
epsilon = 3.25
delta = 0.0001
unit = "a device"
sampling = "none assumed"
trust = "the server sees exact sums"
covers = "the weights"
source = "the server's word"
releases = 12
"""
CARD = b.parse_card(TOML)


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(b.encode_card(CARD))


def public(key: Ed25519PrivateKey) -> list[bytes]:
    return [key.public_key().public_bytes_raw()]


def test_a_card_as_toml_and_as_json() -> None:
    data = b.encode_card(CARD)
    # An independent writer of the canonical form: Python's json.
    assert json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() == data
    assert b.decode_card(data) == CARD
    assert CARD.data == (b.CardData(name="MNIST", licence="CC-BY-SA-3.0", examples=60000),)
    assert CARD.metrics[0].value == 0.97
    assert (CARD.privacy[0].epsilon, CARD.privacy[0].delta, CARD.privacy[0].releases) == (3.25, 0.0001, 12)
    assert CARD.description == "Ten digits.\nGrey pictures."


@pytest.mark.parametrize(
    "card",
    [
        CARD,
        b.ModelCard(name="n", description="d", task="t"),
        b.ModelCard(name='"', description='a\\b\n\n"""c', task="ü 字", references=("x", 'y"')),
        b.ModelCard(name="n", description="d", task="t", metrics=(
            b.CardMetric(name="loss", value=1e-9, data="x", examples=1),
            b.CardMetric(name="loss", value=-2.5e30, data="y", examples=2),
        )),
    ],
)  # fmt: skip
def test_a_card_that_is_written_as_toml_is_read_again(card: b.ModelCard) -> None:
    assert b.parse_card(b.format_card(card)) == card


def _set(**values: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(values)


def _in(field: str, **values: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document[field][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(name=""), "card: name is empty"),
        (_in("privacy", epsilon=-1.0), r"privacy\[0\] has epsilon -1.0 and delta 0.0001, expected a number from 0 on"),
        (_in("privacy", delta=0), r"privacy\[0\] has epsilon 3.25 and delta 0.0"),
        (_in("privacy", delta=1.0), r"privacy\[0\] has epsilon 3.25 and delta 1.0"),
        (_in("privacy", trust="a\x1b"), r"privacy\[0\].trust has U\+001B"),
        (_in("privacy", releases=-1), r"privacy\[0\].releases is -1"),
        (_in("privacy", verified=True), "unknown field `verified`"),
        (_set(task=" \n"), "card: task is empty"),
        (_set(name=3), r"Expected `str`, got `int` - at `\$.name`"),
        (_set(author="me"), "Object contains unknown field `author`"),
        (_set(format=2), "format 2, this installation reads format 1; update archipel"),
        (_set(limits="x" * (MAX_TEXT + 1)), "limits has 4097 characters, the limit is 4096"),
        (_set(limits="\x1b[31mred"), r"limits has U\+001B; leave only printable"),
        (_set(contact="a\rb"), r"contact has U\+000D"),
        (_set(description="left \u202e right"), r"description has U\+202E"),
        (_set(references=["fine", "nul \0"]), r"references\[1\] has U\+0000"),
        (_set(references=["x"] * (MAX_ENTRIES + 1)), "65 references, the limit is 64"),
        (_set(parameters=-1), r"parameters is -1, expected 0 to 2\^53"),
        (_set(parameters=2**53), "parameters is 9007199254740992"),
        (_in("data", use="play"), r"Invalid enum value 'play' - at `\$.data\[0\].use`"),
        (_in("data", licence="\x07"), r"data\[0\]\.licence has U\+0007"),
        (_in("data", examples=-5), r"data\[0\]\.examples is -5"),
        (_in("metrics", value="0.9"), r"Expected `float`, got `str` - at `\$.metrics\[0\].value`"),
        (_in("metrics", examples=1.5), "Expected `int`"),
        (_in("metrics", more=1), "unknown field `more`"),
        (lambda document: document["metrics"][0].pop("examples"), "missing required field `examples`"),
        (lambda document: document.pop("description"), "missing required field `description`"),
    ],
)
def test_each_rule_has_its_error(
    document: dict[str, Any], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    change(document)
    with pytest.raises(CardError, match=message):
        b.decode_card(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "Invalid value"),
        (TOML.replace("0.97", "nan"), "Expected `float`, got `null`"),
        (TOML.replace("0.97", "inf"), "Expected `float`, got `null`"),
        (TOML.replace('"digits"', "1979-05-27"), "Expected `str`, got `date`"),
        ("x" * (MAX_CARD_BYTES + 1), "characters, the limit is 65536"),
    ],
)
def test_wrong_toml_is_refused(text: str, message: str) -> None:
    with pytest.raises(CardError, match=message):
        b.parse_card(text)


def test_structs_of_wrong_types_are_refused() -> None:
    for wrong in (
        msgspec.structs.replace(CARD, name=5),
        msgspec.structs.replace(CARD, metrics=(msgspec.structs.replace(CARD.metrics[0], value=float("nan")),)),
        msgspec.structs.replace(CARD, references=("\ud800",)),
        msgspec.structs.replace(CARD, references=("x" * MAX_TEXT,) * 20),
    ):
        with pytest.raises(CardError):
            b.encode_card(wrong)


@pytest.mark.sampled(every=4)
def test_a_card_travels_in_its_bundle(tmp_path: Path, key: Ed25519PrivateKey, parts: dict[str, Any]) -> None:
    written = b.write_bundle(tmp_path / "linear", key=key, card=CARD, **parts)
    assert written.manifest.files["card.json"] == hashlib.sha256(b.encode_card(CARD)).hexdigest()
    b.pack(written.folder, tmp_path / "linear.bundle")
    opened = b.open_bundle(tmp_path / "linear.bundle", public(key), tmp_path / "cache")
    assert opened.card == CARD
    assert b.write_bundle(tmp_path / "bare", key=key, **parts).card is None


def test_a_changed_card_is_refused(tmp_path: Path, key: Ed25519PrivateKey, parts: dict[str, Any]) -> None:
    folder = b.write_bundle(tmp_path / "linear", key=key, card=CARD, **parts).folder
    file = folder / "card.json"
    opened = b.open_bundle(folder, public(key))
    file.write_bytes(file.read_bytes().replace(b"0.97", b"0.99"))
    with pytest.raises(DigestError, match=r"card\.json: SHA-256 is"):
        b.open_bundle(folder, public(key))
    with pytest.raises(DigestError, match=r"card\.json: its SHA-256 is not the manifest's"):  # opened before the change
        _ = opened.card
    file.unlink()
    with pytest.raises(DigestError, match=r"card\.json: cannot be read"):
        b.open_bundle(folder, public(key))


def test_a_card_that_nobody_signed_is_refused(tmp_path: Path, key: Ed25519PrivateKey, parts: dict[str, Any]) -> None:
    folder = b.write_bundle(tmp_path / "linear", key=key, **parts).folder
    (folder / "card.json").write_bytes(b.encode_card(CARD))
    with pytest.raises(UnsafePathError, match=r"'card\.json' is not in the manifest"):
        b.open_bundle(folder, public(key))


def test_a_signed_card_that_cannot_be_read_stops_no_device(
    tmp_path: Path, key: Ed25519PrivateKey, parts: dict[str, Any]
) -> None:
    """Another writer's card, or a later format's: the bundle opens, and whoever asks for the card gets the error."""
    for data, message in ((b'{"format":2}', "update archipel"), (b"{", "truncated"), (b" " * 70000, "65536")):
        graphs = {**parts["graphs"], "card.json": data}
        folder = b.write_bundle(tmp_path / str(len(data)), key=key, **{**parts, "graphs": graphs}).folder
        opened = b.open_bundle(folder, public(key))
        with pytest.raises(CardError, match=message):
            _ = opened.card


def test_mutated_cards_are_decoded_or_refused() -> None:
    """Only documented errors; what is accepted encodes, and decodes to the same card."""
    good = b.encode_card(CARD)
    refused = 0
    for seed in range(2000):
        rng = random.Random(seed)
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] ^= 1 << rng.randrange(8)
                case 1:
                    del data[at : at + rng.choice([1, 3, 20])]
                case 2:
                    data[at:at] = data[max(0, at - 40) : at]
                case 3:
                    data[at : at + 4] = rng.choice([b"null", b"-1e9", b"[[[[", b"1e99", b'"":0', b"\xff\xfe\0\0"])
        try:
            card = b.decode_card(bytes(data))
        except CardError:
            refused += 1
        else:
            assert b.decode_card(b.encode_card(card)) == card, seed
    assert 800 < refused < 2000


@pytest.mark.parametrize("case", sorted(path.name for path in CORPUS.iterdir()))
def test_the_kept_corpus(case: str) -> None:
    data = (CORPUS / case).read_bytes()
    with pytest.raises(CardError):
        b.parse_card(data.decode()) if case.endswith(".toml") else b.decode_card(data)
