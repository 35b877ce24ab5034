"""The model card in a model's metadata, with which it travels through compression and ONNX files to the next bundle."""

from __future__ import annotations

import onnx_ir as ir

from archipel.bundle.card import ModelCard, decode_card, encode_card
from archipel.errors import CardError

CARD_KEY = "archipel.card"


def card_of(model: ir.Model) -> ModelCard | None:
    """The card in a model's metadata; None if there is none, or one that is not well formed."""
    text = model.metadata_props.get(CARD_KEY)
    try:
        return None if text is None else decode_card(text.encode())
    except (CardError, UnicodeEncodeError):  # the file may be anybody's, with anything under this key
        return None


def set_card(model: ir.Model, card: ModelCard) -> None:
    """Write the card into a model's metadata. Raises CardError."""
    model.metadata_props[CARD_KEY] = encode_card(card).decode()
