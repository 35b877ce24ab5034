"""Whether weights that the server sends come from where it says: FOLDER/origins/NAME.json, one file for each bundle.

The bundle's own weights need no proof, because its publisher signed them. All others have to be in the server's weights
log, of which the device keeps what it has seen: the log may grow, and never change. The device asks for evidence of
each new step, or, if it comes late and there are many, of steps that it draws at random. So it finds out a server that
invented a share of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from archipel import strategies
from archipel.bundle import Bundle, write_weights
from archipel.client.config import AgentConfig
from archipel.client.connection.identity import DeviceRecord
from archipel.client.connection.session import DeviceSession
from archipel.client.memory.stored import read_stored
from archipel.durable import make_folder, sweep, write_durably
from archipel.errors import ProvenanceError
from archipel.protocol.messages import Digest, Endorsement, WeightsLog, WeightsStatement, Whole
from archipel.protocol.provenance import History, LogReader, check_distance, check_endorsement
from archipel.protocol.sealed import encode
from archipel.strategies.strategy import no_broadcast

FOLDER = "origins"
CHECKED = 32
"""So many of the new steps are asked for evidence; of f n that were invented at least one is found with a probability
of 1 - (1 - f)^32."""
MAX_NEW = 1 << 16
"""Entries that a device that comes late reads at most."""
MAX_TASKS = 64
"""For so many the device remembers how far it has come."""
_MAX_BYTES = 2 << 20

FindWeights = Callable[[str], Mapping[str, np.ndarray] | None]
"""The weights with this digest, where the device still has them."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`own` is the digest of the bundle's own weights, `accepted` those that the device has used last."""

    own: Digest
    history: History
    accepted: Annotated[dict[str, Whole], msgspec.Meta(max_length=MAX_TASKS)] = {}
    last: Digest | None = None


class Origins:
    """One process uses the folder at a time. Every change is durable when it returns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        make_folder(self._folder)
        sweep(self._folder)

    def check(
        self,
        bundle: Bundle,
        digest: str,
        weights: Mapping[str, np.ndarray],
        find_weights: FindWeights,
        session: DeviceSession,
        record: DeviceRecord,
        config: AgentConfig,
        *,
        use: str,
        task: str | None = None,
    ) -> int:
        """Accept `weights`, whose SHA-256 is `digest`, for `use` ("training", "adoption" or another), or raise.

        Returns how many rounds have led to them at most, for `check_broadcast`.

        For a training (of `task`) and an adoption the log must not go back, but by an entry that says so. Raises
        ProvenanceError, another ProtocolError where the log is no log, ClientError where the device's own file is
        damaged, and what `session` raises.
        """
        path = self._folder / f"{bundle.digest}.json"
        remedy = "restore it, or remove it: the server's log is then read from its start"
        known = read_stored(path, _MAX_BYTES, "origins record", _Record, remedy) or _Record(
            own=_digest(bundle), history=History(population=record.population, bundle=bundle.digest)
        )
        # The bundle's own weights are signed. Once training began they are looked up like any others: a server that
        # sends the first weights again has gone back, and the log must say so.
        if digest == known.own and not known.history.number:
            return 0  # nothing was ever trained from this bundle, as far as this device knows
        log = self._read_on(known, bundle, session, record)
        if log.number > known.history.number:
            # On disk before the weights are judged: a refused answer must not let the server tell another history next.
            known = msgspec.structs.replace(known, history=log.history)
            write_durably(path, encode(known))
        # A task's weights are looked up among that task's entries: the same weights may be in the log more than once.
        node = log.find(digest, (task or "") if use == "training" else "")
        where = f"weights {digest[:16]}... (entry {node.number} of the server's log)"
        # Nothing leaves the device with a model that it only runs.
        if node.plain and use != "adoption" and not config.allow_plain:
            raise ProvenanceError(
                f"{where}: a round in which the server saw single updates led to them, and this device's owner allows "
                "secure rounds only (setting allow_plain)"
            )
        orders = use in ("training", "adoption")
        name = task if task is not None and use == "training" else use
        newest = known.accepted.get(name, 0) if orders else 0
        if node.again < newest:
            raise ProvenanceError(
                f"{where}: older than entry {newest}, which this device has used, and no later entry goes back to it"
            )
        # Two distances: all steps together may lead this far from the signed weights, and the steps since the device's
        # last ones this far from those. The second is the tighter one for a device that comes often.
        check_distance(where, weights, bundle.parameters(), node.bound, node.number)
        earlier = None if known.last is None else log.newest(known.last)
        if earlier is not None and earlier.weights != digest:
            before = find_weights(earlier.weights)
            if before is not None:
                check_distance(where, weights, before, log.bound_between(earlier, node), node.number)
        if orders:
            # The names used last come first, so that those of tasks that ended long ago are the ones that go.
            newest_first = {name: node.again, **{key: value for key, value in known.accepted.items() if key != name}}
            accepted = dict(list(newest_first.items())[:MAX_TASKS])
            if (accepted, digest) != (known.accepted, known.last):
                write_durably(path, encode(msgspec.structs.replace(known, accepted=accepted, last=digest)))
        return log.steps_to(node)

    def _read_on(self, known: _Record, bundle: Bundle, session: DeviceSession, record: DeviceRecord) -> LogReader:
        """The log with what the server has added since, each entry checked, and evidence for new steps."""
        manifest, url = bundle.manifest, f"/v1/populations/{record.population}/weights-log/{bundle.digest}"

        def bound(entry: WeightsStatement) -> float:
            return (
                strategies.get(manifest.strategy).step_bound(manifest, entry.hyperparameters, entry.devices).parameters
            )

        log = LogReader(known.history, known.own, record.server_key, bound)
        steps: list[WeightsStatement] = []
        while True:
            page = session.call("GET", f"{url}?after={log.number}", WeightsLog)
            # An empty log is no excuse: a server that "lost" its log could start one that it invented.
            if page.newest < log.number:
                raise ProvenanceError(
                    f"weights log of bundle {bundle.digest[:16]}...: the server has {page.newest} entries, this device "
                    f"has seen {log.number}; the server has lost a part of it. The publisher can begin anew with a new "
                    "bundle"
                )
            if page.newest - known.history.number > MAX_NEW:
                raise ProvenanceError(f"weights log of bundle {bundle.digest[:16]}...: more than {MAX_NEW} new entries")
            added = [log.add(sealed) for sealed in page.entries]
            # Only steps of secure rounds have confirmations of devices to show.
            steps += [entry for entry in added if entry.kind == "step" and entry.privacy == "secure"]
            if log.number >= page.newest or not added:
                break
        for entry in _draw_steps(steps):
            evidence = session.call("GET", f"{url}/{entry.number}/endorsement", Endorsement)
            check_endorsement(
                entry, evidence, manifest, log, server_key=record.server_key, enrolment_key=record.enrolment_key
            )
        return log


def check_broadcast(bundle: Bundle, broadcast: Mapping[str, np.ndarray], rounds: int) -> None:
    """Whether what the server sends beside the weights, such as a control variate, can have come of so many rounds.

    It is no part of the log, but moves the weights with every local step; each round changes it by the strategy's bound
    at most. Raises ProvenanceError.
    """
    strategy = strategies.get(bundle.manifest.strategy)
    # Most broadcast nothing; their state, which is as large as the model, is the server's alone.
    start = {} if strategy.broadcast is no_broadcast else strategy.broadcast(strategy.init(bundle.parameters()))
    bound = rounds * strategy.step_bound(bundle.manifest, None, 1).state if rounds else 0.0
    check_distance("what is broadcast with the weights", broadcast, start, bound, rounds)


def _draw_steps(steps: list[WeightsStatement]) -> list[WeightsStatement]:
    """All of them, or the last one and others that nobody can foresee."""
    if len(steps) <= CHECKED:
        return steps
    # The last one always: it is the step that made the weights which the device is about to use.
    return [*secrets.SystemRandom().sample(steps[:-1], CHECKED - 1), steps[-1]]


def _digest(bundle: Bundle) -> str:
    return hashlib.sha256(write_weights(bundle.parameters())).hexdigest()
