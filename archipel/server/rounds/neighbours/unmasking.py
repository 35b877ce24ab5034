"""Takes the masks off the sum of a round over neighbours, and says who sent wrong shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from archipel.errors import DealtSharesError, ShareError, SpoiledRoundError, ThresholdError
from archipel.protocol.secagg_plus.messages import Answer, Question, unpack
from archipel.protocol.secagg_plus.unmask import unmask_sum
from archipel.protocol.vector import Vector
from archipel.server.database.tables import Answer as Row
from archipel.server.rounds.neighbours.frozen_roster import FrozenRoster

WRONG_SHARES_SENT = "wrong unmasking shares"
WRONG_SHARES_DEALT = "dealt wrong shares"


@dataclass(frozen=True)
class Answered:
    """What a round over neighbours has collected when its sum is due, by place: U2, U3, what was asked and answered."""

    frozen: FrozenRoster
    sharers: frozenset[int]
    survivors: frozenset[int]
    questions: Mapping[int, Question]
    answers: Mapping[int, Answer]


def collect(session: Session, frozen: FrozenRoster) -> Answered:
    """All of it from the database; in phase aggregating."""
    survivors, questions = frozen.questions(session)
    rows = session.execute(
        select(Row.device_id, Row.body)
        .where(Row.round_id == frozen.round_id, Row.phase == "unmasking", Row.body.is_not(None))
        .order_by(Row.device_id)
    )
    answers = {frozen.places[row.device_id]: unpack(row.body or b"", Answer) for row in rows}
    return Answered(frozen, frozen.settled_sharers(session), survivors, questions, answers)


def unmask(answered: Answered, total: Vector, modulus_bits: int) -> tuple[Vector, dict[str, str]]:
    """The plain sum, and what devices did wrong without spoiling it, by device id.

    Raises SpoiledRoundError where somebody's wrong shares leave too few, ThresholdError where too few answered.
    """
    frozen, answers = answered.frozen, dict(answered.answers)
    faults: dict[str, str] = {}
    while True:
        try:
            plain = unmask_sum(
                total, session=frozen.session, roster=frozen.roster, sharers=answered.sharers,
                survivors=answered.survivors, questions=answered.questions, answers=answers, modulus_bits=modulus_bits,
            )  # fmt: skip
            return plain, faults
        except DealtSharesError as error:
            dealers = {frozen.ids[int(place)]: WRONG_SHARES_DEALT for place in error.devices}
            raise SpoiledRoundError(str(error), (), faults | dealers) from None
        except ShareError as error:
            # The dealers' commitments say who lies, so the shares of the others are enough while they reach the
            # threshold.
            for place in map(int, error.devices):
                del answers[place]
                faults[frozen.ids[place]] = WRONG_SHARES_SENT
        except ThresholdError as error:
            if not faults:
                raise
            raise SpoiledRoundError(str(error), (), faults) from None
