"""The server's last step: it takes the masks off the sum of the survivors' vectors.

All secrets of a round are reconstructed at once, in NumPy. The digests that dealers committed to say whether a secret
is right; only where one is not, the commitments to single shares say who lied, however few answered.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from archipel.errors import DealtSharesError, ShareError, ThresholdError
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.masks import apply_masks, reduce
from archipel.protocol.secagg_plus.agreement import Draw, Private
from archipel.protocol.secagg_plus.envelope import COMMITMENTS_BYTES, bind
from archipel.protocol.secagg_plus.member import Session, seed_digest
from archipel.protocol.secagg_plus.messages import Answer, Question
from archipel.protocol.secagg_plus.roster import Roster
from archipel.protocol.secagg_plus.shares import COMMITMENT_BYTES, ELEMENTS, commit, reconstruct
from archipel.protocol.vector import Vector, check_vector


def unmask_sum(
    total: Vector,
    *,
    session: Session,
    roster: Roster,
    sharers: Collection[int],
    survivors: Collection[int],
    questions: Mapping[int, Question],
    answers: Mapping[int, Answer],
    modulus_bits: int,
    threads: int | None = None,
) -> Vector:
    """The plain sum of the survivors' vectors.

    Arguments:
        total: the sum of their masked vectors, uint32 [length], below 2^modulus_bits; it is not changed.
        roster: who drew whom, and who holds which shares.
        sharers: the places of U2, see `Roster.settle`.
        survivors: those of U3, within U2.
        questions, answers: what each device was asked and what it answered, by place; `check_answer` has passed.
        threads: that expand masks; all cores by default.

    Returns:
        uint32 [length], modulo 2^modulus_bits.

    Raises:
        ThresholdError: too few answered.
        ShareError: some showed other shares than they were dealt. It has their places, as text: leave their answers
            out and try again.
        DealtSharesError: the places in it dealt wrong shares, or wrong keys of masks, so the sum cannot be unmasked.
    """
    check_vector("sum", total, modulus_bits)
    present, left = sorted(survivors), sorted(set(sharers) - set(survivors))
    shares = _Shares(roster, questions, answers)
    bound, agreement = bind(session, roster.root), roster.agreement(session)
    found_keys: dict[int, Private] = {}

    def is_mask_secret(place: int, secret: bytes) -> bool:
        found_keys[place] = agreement.private(secret)
        return agreement.is_of(found_keys[place], roster.keys[place])

    seeds = shares.recover(present, "seed", bound, lambda place, seed: _is_seed(roster, session, place, seed))
    shares.recover(left, "mask key", bound, is_mask_secret)
    salt = session.salt

    # All keys before any mask: agreements hold the interpreter's lock, for which threads that expand masks would wait.
    masks = [(keys.self_mask_key(seeds[place], salt, roster.keys[place].mask_key), -1) for place in present]
    wrong: set[int] = set()
    for gone, here, drawer, column in roster.pairs(sharers, left).tolist():
        draw, drew = Draw(bound, drawer, here if drawer == gone else gone), drawer == gone
        try:
            part = agreement.recover(found_keys[gone], roster.offers[drawer, column].tobytes(), draw, drew)
        except ShareError:
            wrong.add(drawer)
            continue
        key = agreement.mask_key(found_keys[gone], roster.keys[here].mask_key, part, draw, drew)
        # The survivor at the higher place added the mask, so it is taken off, and the other way round.
        masks.append((key, -1 if here > gone else 1))
    if wrong:
        names = [str(place) for place in sorted(wrong)]
        raise DealtSharesError(f"keys of masks: places {names[:3]} sent others than they committed to", names)

    def take_off(part: Sequence[tuple[bytes, int]]) -> Vector:
        found = np.zeros_like(total)
        apply_masks(found, part)
        return found

    count = threads or len(os.sched_getaffinity(0))
    result = total.copy()
    with ThreadPoolExecutor(count) as pool:
        for found in pool.map(take_off, [masks[index::count] for index in range(count)]):
            result += found
    reduce(result, modulus_bits)
    return result


class _Shares:
    """The shares in all answers, as one array that (dealer, position) points into."""

    def __init__(self, roster: Roster, questions: Mapping[int, Question], answers: Mapping[int, Answer]) -> None:
        self._roster = roster
        self._where: NDArray[np.int64] = np.full(roster.drawn.shape, -1)
        parts, start = [], 0
        for holder in sorted(answers):
            question, answer = questions[holder], answers[holder]
            asked = [*question.present, *question.left]
            dealers = np.array(asked, np.int64)
            position = (roster.drawn[dealers] == holder).argmax(axis=1) if asked else dealers
            self._where[dealers, position] = np.arange(start, start + len(asked))
            parts += [answer.seeds, answer.mask_keys]
            start += len(asked)
        self._values = np.frombuffer(b"".join(parts), "<u4").reshape(-1, ELEMENTS)

    def recover(self, dealers: Sequence[int], kind: str, bound: bytes, is_right) -> dict[int, bytes]:  # type: ignore[no-untyped-def]
        """The secrets of `dealers`, by place. Raises ThresholdError or ShareError."""
        if not dealers:
            return {}
        threshold = self._roster.sizes.threshold
        where = self._where[list(dealers)]
        shown = where >= 0
        few = np.flatnonzero(shown.sum(axis=1) < threshold)
        if few.size:
            raise ThresholdError(
                f"{few.size} secrets cannot be recovered: of place {dealers[few[0]]} {shown[few[0]].sum()} shares were "
                f"shown, the threshold is {threshold}"
            )
        # The first `threshold` positions that were shown, in each row.
        positions = np.argsort(~shown, axis=1, kind="stable")[:, :threshold]
        shares = self._values[np.take_along_axis(where, positions, axis=1)]
        secrets = reconstruct(positions + 1, shares)
        found, lied, dealt_wrong = {}, set(), set()
        for index, (dealer, secret) in enumerate(zip(dealers, secrets, strict=True)):
            if secret is not None and is_right(dealer, secret):
                found[dealer] = secret
            elif liars := self._liars(dealer, positions[index], shares[index], kind, bound):
                lied |= liars
            else:
                dealt_wrong.add(dealer)
        for blamed, did, error in ((lied, "showed", ShareError), (dealt_wrong, "dealt", DealtSharesError)):
            if blamed:
                names = [str(place) for place in sorted(blamed)]
                raise error(f"shares of a {kind}: places {names[:3]} {did} wrong ones", names)
        return found

    def _liars(
        self, dealer: int, positions: NDArray[np.int64], shares: NDArray[np.uint32], kind: str, bound: bytes
    ) -> set[int]:
        """Who showed another share than the dealer committed to."""
        liars = set()
        for position, share in zip(positions.tolist(), shares):
            pair = self._roster.dealt[dealer, position, -COMMITMENTS_BYTES:].tobytes()
            committed = pair[:COMMITMENT_BYTES] if kind == "mask key" else pair[COMMITMENT_BYTES:]
            if commit(dealer, position + 1, share.astype("<u4").tobytes(), bound + kind.encode()) != committed:
                liars.add(int(self._roster.drawn[dealer, position]))
        return liars


def _is_seed(roster: Roster, session: Session, place: int, seed: bytes) -> bool:
    return seed_digest(seed, session) == roster.keys[place].seed_digest
