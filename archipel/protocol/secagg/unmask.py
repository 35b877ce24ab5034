"""The server's side of the last step: take the masks off the sum of the survivors' vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from archipel.errors import ConsistencyError, ShareError, ThresholdError
from archipel.protocol.messages import Cohort, RoundPlan, Unmasking
from archipel.protocol.sealed import encode
from archipel.protocol.secagg import keys
from archipel.protocol.secagg.checks import check_unmasking
from archipel.protocol.secagg.cohort import advertised_plan, read_cohort
from archipel.protocol.secagg.masks import apply_mask, pairwise_sign, reduce
from archipel.protocol.secagg.session import Peer
from archipel.protocol.secagg.shamir import Interpolation
from archipel.protocol.vector import Vector, check_vector


def unmask_sum(
    total: Vector,
    *,
    plan: RoundPlan,
    cohort: Cohort,
    sharers: Sequence[str],
    survivors: Sequence[str],
    answers: Mapping[str, Unmasking],
) -> Vector:
    """The plain sum modulo 2^b, uint32 [length], from `total`, the sum of the survivors' masked vectors (not changed).

    `cohort` is U1 (verified by the caller when its members advertised), `sharers` U2 without those that complaints
    exclude, `survivors` U3, `answers` what U5 revealed, by device. Of a dropped device the mask key is reconstructed,
    of a survivor the seed, never both.

    A mask key must fit its public key. Wrong shares of a seed are seen when more than `threshold` answered; with fewer
    they garble the sum. Seeds are not committed to: whoever would send a wrong share can garble the sum as well by its
    own vector, and `Layout.decode_sum` refuses a sum that is out of range.

    Raises ThresholdError (too few survivors or answers), ConsistencyError (the sets do not nest), ShareError (with the
    devices to blame, where known: leave their answers out and try again).
    """
    check_vector("sum", total, plan.modulus_bits)
    peers = read_cohort(cohort)
    _check_sets(plan, peers, sharers, survivors, answers)
    salt = keys.round_salt(plan.round_id, advertised_plan(cohort))
    recovery = _Recovery(plan, peers, answers)
    dropped = [peers[device] for device in sorted(set(sharers) - set(survivors))]
    present = [peers[device] for device in sorted(survivors)]
    result = total.copy()
    for gone in dropped:
        private = recovery.mask_key(gone)
        for peer in present:
            key = keys.pairwise_mask_key(keys.agree(private, peer.mask_key), salt, gone.mask_key, peer.mask_key)
            apply_mask(result, key, -pairwise_sign(peer.device_id, gone.device_id))
    for peer in present:
        apply_mask(result, keys.self_mask_key(recovery.seed(peer), salt, peer.mask_key), -1)
    reduce(result, plan.modulus_bits)
    return result


def liars(plan: RoundPlan) -> int:
    """So many devices may lie together without an honest one being blamed: the policy's colluders, one at least."""
    return max(plan.colluders, 1)


def disputes(
    *, plan: RoundPlan, cohort: Cohort, answers: Mapping[str, Unmasking], doubted: Mapping[str, Unmasking]
) -> dict[str, list[str]]:
    """By device of `doubted` the dealers whose shares in its answer do not fit those in `answers`, which fit together.

    Of each pair either the device or the dealer lies. Nothing is found where `answers` are fewer than the threshold and
    `liars`: with threshold - 1 true shares any others can be made to fit, and then the next true one does not.
    """
    if not doubted or len(answers) - plan.threshold < liars(plan):
        return {}
    peers = read_cohort(cohort)
    return {
        device: _Recovery(plan, peers, {**answers, device: doubted[device]}).misfits() for device in sorted(doubted)
    }


class _Recovery:
    """The secrets behind the answers."""

    def __init__(self, plan: RoundPlan, peers: Mapping[str, Peer], answers: Mapping[str, Unmasking]) -> None:
        self._liars = liars(plan)
        self._answerers = sorted(answers)
        challenge = b"".join(encode(answers[device]) for device in self._answerers)
        self._interpolation = Interpolation([peers[d].position for d in self._answerers], plan.threshold, challenge)
        self._seeds = [{s.device: s.share for s in answers[d].self_seeds} for d in self._answerers]
        self._mask_keys = [{s.device: s.share for s in answers[d].mask_keys} for d in self._answerers]

    def seed(self, peer: Peer) -> bytes:
        return self._secret("self-mask seed", peer, [shares[peer.device_id] for shares in self._seeds])

    def mask_key(self, peer: Peer) -> bytes:
        private = self._secret("mask key", peer, [shares[peer.device_id] for shares in self._mask_keys])
        if keys.public_key(private) != peer.mask_key:
            # Fewer could not make all shares fit together: then these are what was dealt.
            dealt = self._interpolation.surplus >= self._liars
            raise ShareError(
                f"mask key of {peer.device_id}: the shares give a key that does not fit the one it advertised; "
                + ("it dealt wrong shares" if dealt else "it dealt wrong shares, or one who answered gave a wrong one"),
                [peer.device_id] if dealt else [],
            )
        return private

    def misfits(self) -> list[str]:
        """Devices of whose shares those that are there do not lie on one polynomial."""
        found = []
        for each in (self._seeds, self._mask_keys):
            for dealer in sorted(each[0]):
                try:
                    self._interpolation.secret([shares[dealer] for shares in each])
                except ShareError:
                    found.append(dealer)
        return found

    def _secret(self, what: str, peer: Peer, shares: Sequence[bytes]) -> bytes:
        try:
            return self._interpolation.secret(shares)
        except ShareError as error:
            index = self._interpolation.outlier(shares)
            if index is None:
                raise ShareError(f"{what} of {peer.device_id}: {error}") from None
            blamed = self._answerers[index]
            raise ShareError(
                f"{what} of {peer.device_id}: the share from {blamed} does not fit the others", [blamed]
            ) from None


def _check_sets(
    plan: RoundPlan,
    peers: Mapping[str, Peer],
    sharers: Sequence[str],
    survivors: Sequence[str],
    answers: Mapping[str, Unmasking],
) -> None:
    for name, devices in (("sharers", sharers), ("survivors", survivors)):
        if len(set(devices)) != len(devices):
            raise ConsistencyError(f"{name}: a device is listed twice")
    if not set(answers) <= set(survivors) <= set(sharers) <= set(peers):
        raise ConsistencyError("those who answered must be survivors, survivors sharers, and sharers in the cohort")
    needed = max(plan.threshold, plan.min_cohort)
    if len(survivors) < needed:
        raise ThresholdError(f"{len(survivors)} survivors, the plan needs {needed}; the round fails")
    if len(answers) < plan.threshold:
        raise ThresholdError(f"{len(answers)} devices revealed shares, the threshold is {plan.threshold}")
    for device in sorted(answers):
        check_unmasking(answers[device], device, sharers, survivors)
