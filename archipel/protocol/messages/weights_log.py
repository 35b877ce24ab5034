"""Where weights come from: the server's log, and the confirmations of devices that endorse its steps."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from archipel.protocol.messages.base import MAX_COHORT, MAX_ENTRIES, Digest, Message, Name, RoundId, Whole
from archipel.protocol.messages.identity import Chain
from archipel.protocol.messages.secure import Survivors
from archipel.protocol.sealed import Sealed


class WeightsStatement(Message, frozen=True, kw_only=True):
    """Label "weights"; sealed by the server key: entry `number`, from 1, of the log of one bundle in one population.

    `previous` is the SHA-256 of the body of the entry before, 64 zeros in the first one. `start` (of task `task_id`)
    names the bundle's own weights, `rollback` weights of an earlier entry. `step` says that a round changed `parent`
    into `weights`: it has the `round_id`, the digests of its `plan` and of its decoded `sum`, the number of `devices`
    in the sum, and the `hyperparameters` of the strategy's server half. Where these members are edge servers, `leaves`
    is the number of devices below all of them, else 0.
    """

    population: Name
    bundle: Digest
    number: Annotated[int, Meta(ge=1, le=2**53 - 1)]
    previous: Digest
    kind: Literal["start", "step", "rollback"]
    weights: Digest
    task_id: RoundId | None = None
    parent: Digest | None = None
    round_id: RoundId | None = None
    plan: Digest | None = None
    privacy: Literal["secure", "plain"] = "secure"
    sum: Digest | None = None
    devices: Annotated[int, Meta(ge=0, le=MAX_COHORT)] = 0
    hyperparameters: Annotated[dict[Name, float], Meta(max_length=64)] = {}
    leaves: Whole = 0


class WeightsLog(Message, frozen=True, kw_only=True):
    """Entries of a log in their order, each a sealed WeightsStatement; `newest` is the number of the log's last one."""

    entries: Annotated[list[Sealed], Meta(max_length=MAX_ENTRIES)]
    newest: Whole


class Endorser(Message, frozen=True, kw_only=True):
    """A device that signed the round's confirmation, with its chain at that time."""

    chain: Chain
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class Endorsement(Message, frozen=True, kw_only=True):
    """The evidence of a secure round: its sealed plan, its survivors (U3), the body of the Confirmation that they
    signed (over neighbours the root of their cohort), and their signatures.

    Example:
        evidence = client.weights_log.endorsement("pupils", digest, 2)
        print(len(evidence.endorsers), "devices signed")  # 3 devices signed
    """

    plan: Sealed
    survivors: Survivors
    confirmation: Annotated[bytes, Meta(max_length=1024)]
    endorsers: Annotated[list[Endorser], Meta(max_length=MAX_COHORT)]
