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
    """The plain sum of the survivors' vectors.

    The function reconstructs a dropped device's mask key and a survivor's seed, never both of one device. A mask key
    must fit its public key. Wrong shares of a seed are noticed when more than `threshold` devices answered; with fewer
    they garble the sum. Devices do not commit to their seeds, because a device that would send a wrong share could as
    well garble the sum with its own vector, and `Layout.decode_sum` refuses a sum that is out of range.

    Arguments:
        total: the sum of the survivors' masked vectors, uint32 [length], below 2^b; it is not changed.
        plan: the round's plan, whose `modulus_bits` are b.
        cohort: U1, whose members the caller verified when they advertised.
        sharers: U2 without the devices that complaints exclude.
        survivors: U3.
        answers: what the devices of U5 revealed, by device.

    Returns:
        uint32 [length], modulo 2^b.

    Raises:
        ThresholdError: too few survivors or answers.
        ConsistencyError: U5 is not within U3, U3 not within U2 or U2 not within U1.
        ShareError: shares are missing or do not fit. It has the devices to blame, where they are known: leave their
            answers out and try again.
    """
    check_vector("sum", total, plan.modulus_bits)
    peers = read_cohort(cohort)
    # Before any secret is reconstructed: with too few devices in the sum nothing of it may come to light.
    _check_sets(plan, peers, sharers, survivors, answers)
    salt = keys.round_salt(plan.round_id, advertised_plan(cohort))
    recovery = _Recovery(plan, peers, answers)
    dropped = [peers[device] for device in sorted(set(sharers) - set(survivors))]
    present = [peers[device] for device in sorted(survivors)]
    result = total.copy()
    # The masks of a pair of survivors cancel in the sum. Those between a survivor and a dropped device remain, with the
    # survivor's sign.
    for absent in dropped:
        private = recovery.mask_key(absent)
        for peer in present:
            key = keys.pairwise_mask_key(keys.agree(private, peer.mask_key), salt, absent.mask_key, peer.mask_key)
            apply_mask(result, key, -pairwise_sign(peer.device_id, absent.device_id))
    for peer in present:
        apply_mask(result, keys.self_mask_key(recovery.seed(peer), salt, peer.mask_key), -1)
    reduce(result, plan.modulus_bits)
    return result


def liars(plan: RoundPlan) -> int:
    """How many devices may lie together without an honest one being blamed: the policy's colluders, at least one."""
    return max(plan.colluders, 1)


def disputes(
    *, plan: RoundPlan, cohort: Cohort, answers: Mapping[str, Unmasking], doubted: Mapping[str, Unmasking]
) -> dict[str, list[str]]:
    """For each device of `doubted`, the dealers whose shares in its answer do not fit the shares in `answers`.

    `answers` fit together. Of each pair (device, dealer) one lies. The result is empty where there are fewer `answers`
    than the threshold plus `liars`: with threshold - 1 true shares the liars can make their own shares fit, and then
    the next true share does not.
    """
    if not doubted or len(answers) - plan.threshold < liars(plan):
        return {}
    peers = read_cohort(cohort)
    # Each doubted answer alone: the others fit together, so a misfit is due to this device or its dealer.
    return {
        device: _Recovery(plan, peers, {**answers, device: doubted[device]}).misfits() for device in sorted(doubted)
    }


class _Recovery:
    """Reconstructs secrets from the shares in the answers."""

    def __init__(self, plan: RoundPlan, peers: Mapping[str, Peer], answers: Mapping[str, Unmasking]) -> None:
        self._liars = liars(plan)
        self._answerers = sorted(answers)
        # Interpolation hashes it. It holds every share, so no device can choose its shares to pass the check.
        challenge = b"".join(encode(answers[device]) for device in self._answerers)
        # The answerers' positions are the same for every secret, so one interpolation serves all of them.
        self._interpolation = Interpolation([peers[d].position for d in self._answerers], plan.threshold, challenge)
        self._seeds = [{s.device: s.share for s in answers[d].self_seeds} for d in self._answerers]
        self._mask_keys = [{s.device: s.share for s in answers[d].mask_keys} for d in self._answerers]

    def seed(self, peer: Peer) -> bytes:
        return self._secret("self-mask seed", peer, [shares[peer.device_id] for shares in self._seeds])

    def mask_key(self, peer: Peer) -> bytes:
        private = self._secret("mask key", peer, [shares[peer.device_id] for shares in self._mask_keys])
        if keys.public_key(private) != peer.mask_key:
            # The shares lie on one polynomial. With so much surplus, `liars` devices cannot have made them do so: the
            # dealer dealt them like that.
            dealt = self._interpolation.surplus >= self._liars
            raise ShareError(
                f"mask key of {peer.device_id}: the shares give a key that does not fit the one it advertised; "
                + ("it dealt wrong shares" if dealt else "it dealt wrong shares, or one who answered gave a wrong one"),
                [peer.device_id] if dealt else [],
            )
        return private

    def misfits(self) -> list[str]:
        """Dealers whose shares do not lie on one polynomial."""
        dealers = []
        for answers in (self._seeds, self._mask_keys):
            for dealer in sorted(answers[0]):
                try:
                    self._interpolation.secret([shares[dealer] for shares in answers])
                except ShareError:
                    dealers.append(dealer)
        return dealers

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
        raise ConsistencyError(
            "expected answers from survivors, survivors among the sharers, and sharers in the cohort"
        )
    needed = max(plan.threshold, plan.min_cohort)
    if len(survivors) < needed:
        raise ThresholdError(f"{len(survivors)} survivors, the plan needs {needed}; the round fails")
    if len(answers) < plan.threshold:
        raise ThresholdError(f"{len(answers)} devices revealed shares, the threshold is {plan.threshold}")
    for device in sorted(answers):
        check_unmasking(answers[device], device, sharers, survivors)
