"""An enrolled device sends its peers envelopes that do not open, in every round of a task.

It wants the task to end: peers that cannot open their shares leave, no round is completed, and after five failed ones
the task is failed for good. What stops it: before anything is masked, each peer shows the signed envelope together with
the key that only this envelope was sealed to. Everybody sees that it does not open; the sender is out of the round, the
fault is put down to it, and the others' sum is exact.
"""

from __future__ import annotations

import numpy as np
import pytest

import archipel.client.rounds.participation as participation
from archipel.protocol.messages import Cohort, EncryptedShare, Shares
from archipel.protocol.secagg import Participant
from archipel.protocol.secagg.envelope import sign_envelope
from tests.support.federation import Federation
from tests.support.fixtures.federation import *  # noqa: F403


class Spoiling(Participant):
    """A device that signs envelopes that do not open, for some of its peers or for all."""

    victims: int
    hostile: str = ""

    def share(self, cohort: Cohort) -> Shares:
        sent = super().share(cohort)
        return sent if self.device_id != self.hostile else Shares(shares=[self._spoil(s) for s in sent.shares])

    def _spoil(self, share: EncryptedShare) -> EncryptedShare:
        peers = [peer for peer in sorted(self._session.peers) if peer != self.device_id]
        if share.peer not in peers[: self.victims]:
            return share
        ciphertext = bytes(len(share.ciphertext))
        associated = self._session.associated(self.device_id, share.peer)
        signature = sign_envelope(self._identity, ciphertext, associated)
        return EncryptedShare(peer=share.peer, ciphertext=ciphertext, signature=signature)


@pytest.mark.parametrize("victims", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.sampled(every=4)
def test_the_task_is_completed_without_it(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, victims: int
) -> None:
    agents = [federation.agent(number) for number in range(5)]
    hostile = agents[2]
    monkeypatch.setattr(Spoiling, "hostile", hostile.device_id)
    monkeypatch.setattr(Spoiling, "victims", victims, raising=False)
    monkeypatch.setattr(participation, "Participant", Spoiling)
    task = federation.task(cohort=5, min_cohort=3, threshold=3, rounds=2)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")

    assert federation.operator.tasks.get(task.task_id).state == "completed"
    honest = [(agent, number) for number, agent in enumerate(agents) if agent is not hostile]
    rounds = federation.rounds(task)
    assert [info.phase for info in rounds] == ["committed", "committed"]
    for info in rounds:
        assert set(info.survivors) == {agent.device_id for agent, _ in honest}
    # What plain federated averaging of the other four makes of the same model.
    start = federation.operator.weights.read(rounds[-1].weights_in)["w"]
    expected = federation.expected_weights(start, honest, task)
    np.testing.assert_allclose(federation.operator.weights.read(rounds[-1].weights_out)["w"], expected, rtol=1e-6)

    faults = [entry for entry in federation.operator.audit.list() if entry.action == "device.fault"]
    assert [(entry.subject, entry.detail["round"]) for entry in faults] == [
        (hostile.device_id, info.round_id) for info in rounds
    ]
    assert {outcome.result for outcome in hostile.rounds} == {"dropped"}
