"""The check of where weights come from, with the file FOLDER/origins/DIGEST.json for each bundle.

A bundle's own weights need no proof, because the publisher signed them. All others must be in the server's weights log.
The device remembers what it has seen of the log, which may grow but never change. It asks for evidence of each new step
or, if there are many because it was away, of steps that it draws at random: so it catches a server that invented a
share of the steps.
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
from archipel.protocol.provenance import History, LogReader, check_distance, check_endorsement, check_layout
from archipel.protocol.sealed import encode
from archipel.strategies.running_statistics import check_statistics, shared_statistics, split_statistics
from archipel.strategies.strategy import no_broadcast
from archipel.strategies.update_compression import check_bases, split_bases

FOLDER = "origins"
CHECKED = 32
"""The device asks for evidence of at most this many new steps. If a share f of them is invented, it finds one with a
probability of 1 - (1 - f)^32."""
MAX_NEW = 1 << 16
"""The most new entries that a device reads after it was away."""
MAX_TASKS = 64
"""For how many tasks the device remembers the last entry that it has used."""
_MAX_BYTES = 2 << 20

Arrays = Mapping[str, np.ndarray]
FindWeights = Callable[[str], Arrays | None]
"""The weights with this digest; None if the device has them no longer."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file. `own` is the digest of the bundle's own weights; `accepted` has the newest entry that was used, by task
    (or "adoption"); `last` is the digest of the weights that were used last."""

    own: Digest
    history: History
    accepted: Annotated[dict[str, Whole], msgspec.Meta(max_length=MAX_TASKS)] = {}
    last: Digest | None = None


class Origins:
    """The records of one device. One process at a time uses the folder. Every change is durable when it returns."""

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

        Returns the most rounds that can have led to them, for `check_broadcast`.

        For a training (of `task`) and an adoption the log must not go back to older weights, unless an entry of it says
        so. Raises ProvenanceError, another ProtocolError if the log is malformed, ClientError if the device's own file
        is damaged, and what `session` raises.
        """
        path = self._folder / f"{bundle.digest}.json"
        remedy = "restore it, or remove it: the server's log is then read from its start"
        known = read_stored(path, _MAX_BYTES, "origins record", _Record, remedy) or _Record(
            own=_digest(bundle), history=History(population=record.population, bundle=bundle.digest)
        )
        # The bundle's own weights are signed. Once the log has entries, they are looked up like any others: a server
        # that sends them again goes back, and the log must say so.
        if digest == known.own and not known.history.number:
            return 0  # nothing was ever trained from this bundle, as far as this device knows
        log = self._read_on(known, bundle, session, record)
        if log.number > known.history.number:
            # On disk before the weights are checked: even if they are refused, the server cannot show another history
            # next time.
            known = msgspec.structs.replace(known, history=log.history)
            write_durably(path, encode(known))
        # The same weights may be in the log more than once, so a training looks among its own task's entries.
        node = log.find(digest, (task or "") if use == "training" else "")
        where = f"weights {digest[:16]}... (entry {node.number} of the server's log)"
        # An adoption sends nothing, so `allow_plain`, which is about what the server may see, does not concern it.
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
        # Two bounds on the distance that the logged steps can cover: from the signed weights, and from the weights that
        # this device used last. The second is tighter for a device that takes part often.
        _check_moved(where, bundle, weights, bundle.parameters(), node.bound, node.number, (0, log.steps_to(node)))
        earlier = None if known.last is None else log.newest(known.last)
        if earlier is not None and earlier.weights != digest:
            before = find_weights(earlier.weights)
            if before is not None:
                bound, rounds = log.bound_between(earlier, node), log.steps_between(earlier, node)
                _check_moved(where, bundle, weights, before, bound, node.number, rounds)
        if orders:
            # The name used now comes first, so the names beyond MAX_TASKS are those of tasks that ended long ago.
            newest_first = {name: node.again, **{key: value for key, value in known.accepted.items() if key != name}}
            accepted = dict(list(newest_first.items())[:MAX_TASKS])
            if (accepted, digest) != (known.accepted, known.last):
                write_durably(path, encode(msgspec.structs.replace(known, accepted=accepted, last=digest)))
        return log.steps_to(node)

    def _read_on(self, known: _Record, bundle: Bundle, session: DeviceSession, record: DeviceRecord) -> LogReader:
        """Read what the server has added to the log, and check each entry, and the evidence for new steps."""
        manifest, url = bundle.manifest, f"/v1/populations/{record.population}/weights-log/{bundle.digest}"

        def bound(entry: WeightsStatement) -> float:
            devices = entry.leaves or entry.devices
            return strategies.get(manifest.strategy).step_bound(manifest, entry.hyperparameters, devices).parameters

        log = LogReader(known.history, known.own, record.server_key, bound)
        steps: list[WeightsStatement] = []
        while True:
            page = session.call("GET", f"{url}?after={log.number}", WeightsLog)
            # Also for an empty log: a server that claims to have lost its log could start an invented one.
            if page.newest < log.number:
                raise ProvenanceError(
                    f"weights log of bundle {bundle.digest[:16]}...: the server has {page.newest} entries, this device "
                    f"has seen {log.number}; the server has lost a part of it. The publisher can begin anew with a new "
                    "bundle"
                )
            if page.newest - known.history.number > MAX_NEW:
                raise ProvenanceError(f"weights log of bundle {bundle.digest[:16]}...: more than {MAX_NEW} new entries")
            added = [log.add(sealed) for sealed in page.entries]
            # Only for steps of secure rounds are there devices' signed confirmations as evidence.
            steps += [entry for entry in added if entry.kind == "step" and entry.privacy == "secure"]
            if log.number >= page.newest or not added:
                break
        for entry in _draw_steps(steps):
            evidence = session.call("GET", f"{url}/{entry.number}/endorsement", Endorsement)
            check_endorsement(
                entry, evidence, manifest, log, server_key=record.server_key, enrolment_key=record.enrolment_key
            )
        return log


def _check_moved(
    where: str, bundle: Bundle, weights: Arrays, others: Arrays, bound: float, entries: int, rounds: tuple[int, int]
) -> None:
    """Check that what gradients train is at most `bound` from `others`, and running statistics so many rounds."""
    pairs = shared_statistics(bundle.manifest)
    trained, statistics = split_statistics(weights, pairs)
    other_trained, other_statistics = split_statistics(others, pairs)
    check_distance(where, trained, other_trained, bound, entries)
    check_layout(where, statistics, other_statistics)
    check_statistics(where, statistics, other_statistics, pairs, *rounds)


def check_broadcast(bundle: Bundle, broadcast: Mapping[str, np.ndarray], rounds: int) -> None:
    """Check that so many rounds can have led to what the server sends with the weights, such as a control variate.

    It is not in the log, but it changes the weights in every local step. Each round changes it by at most the
    strategy's bound. Raises ProvenanceError.
    """
    strategy = strategies.get(bundle.manifest.strategy)
    rest, bases = split_bases(broadcast)
    check_bases(bundle.manifest, bases)
    # Most strategies broadcast nothing: then their state, which is as large as the model, need not be made.
    start = {}
    if strategy.broadcast is not no_broadcast:
        trained, _ = split_statistics(bundle.parameters(), shared_statistics(bundle.manifest))
        start = strategy.broadcast(strategy.init(trained))
    bound = rounds * strategy.step_bound(bundle.manifest, None, 1).state if rounds else 0.0
    check_distance("what is broadcast with the weights", rest, start, bound, rounds)


def _draw_steps(steps: list[WeightsStatement]) -> list[WeightsStatement]:
    """All steps if they are few, else the last one and a random sample that the server cannot predict."""
    if len(steps) <= CHECKED:
        return steps
    # The last step made the weights that the device is about to use.
    return [*secrets.SystemRandom().sample(steps[:-1], CHECKED - 1), steps[-1]]


def _digest(bundle: Bundle) -> str:
    return hashlib.sha256(write_weights(bundle.parameters())).hexdigest()
