"""The model card of a version that a server has: what the server's account of differential privacy says of it."""

from __future__ import annotations

from archipel.bundle import CardPrivacy, ModelCard
from archipel.errors import CommandError
from archipel.protocol.operator.registry import VersionDetail


def make_card(version: VersionDetail, card: ModelCard | None) -> ModelCard:
    """The card with what the version's training tells about a device, in place of what it said of that before.

    Arguments:
        version: as the server describes it.
        card: of the model; None: one with the model's name is begun.

    Raises CommandError for a version of which the server states nothing.
    """
    spent = version.privacy_spent
    if spent is None:
        raise CommandError(
            f"version {version.number} of model {version.model!r} has no differential privacy that its server states: "
            "neither it nor a version that it was made from comes from rounds with the server's noise"
        )
    if card is None:
        card = ModelCard(
            name=version.model, description=f"Version {version.number} of {version.model}.", task="not stated"
        )
    covers = spent.covers
    if spent.exact:
        covers += f"; not {spent.exact} sums of other tasks of the model, which were released without noise"
    stated = CardPrivacy(
        epsilon=spent.epsilon,
        delta=spent.delta,
        unit=spent.unit,
        sampling=spent.sampling,
        trust=spent.trust,
        covers=covers,
        accountant=spent.accountant,
        releases=spent.releases,
        source=(
            f"the word of the server of population {spent.population}, for all tasks of model {spent.model} up to "
            f"version {version.number} ({version.digest[:12]}); nobody can check that noise was added"
        ),
    )
    return ModelCard(**{name: getattr(card, name) for name in card.__struct_fields__} | {"privacy": (stated,)})
