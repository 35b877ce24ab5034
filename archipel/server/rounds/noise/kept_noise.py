"""The noise of a task whose rounds take back noise of earlier ones (archipel.privacy.correlated).

It is drawn before the coordinator looks at the round's sum, and put in place in this order: its file, sealed with a key
of the server's, goes into the spool under the task's id; one transaction pays for the round and names the file; then
the oldest file is deleted. A kill before the transaction leaves a file that no row names, and the noise is drawn again,
of which nothing was released. A kill after it finds the noise of the round: the round adds it again to the same sum, so
it releases the same and has been paid for. No round has two noises, and none is of two rounds.

Whoever has the noise of a round and the model that it made has its sum, so it is kept no longer than it is needed, and
is in no backup (archipel.server.storage.backup). A server that has forgotten rounds would take their noise back a
second time, in other sums, and the account would not know: so a task whose noise is lost ends.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from archipel.bundle import decode_manifest
from archipel.errors import ServerError
from archipel.privacy.central import Noise, draw_noise
from archipel.protocol.operator.differential_privacy import MAX_BANDS, DifferentialPrivacy
from archipel.protocol.uploads import plan_layout
from archipel.server.database.privacy_tables import PrivacyEvent
from archipel.server.database.tables import UPDATE_PHASES, Answer, BundleRow, Round, Task
from archipel.server.database.task_requests import read_plan, request_of
from archipel.server.rounds.candidates import in_last_sums
from archipel.server.storage.spool import noise_name

if TYPE_CHECKING:
    from archipel.server.services import Services

MAX_ELEMENTS = (1 << 31) // 8 - 16
"""What one sealed file can hold."""
_NONCE = 12


def is_drawn(session: Session, round_id: str) -> bool:
    """Whether the round has its noise, and so has been paid for."""
    return session.scalar(select(PrivacyEvent.number).where(PrivacyEvent.round_id == round_id).limit(1)) is not None


def draw(services: Services, round_id: str) -> str:
    """Draw the round's noise, and store it durably. Returns the digest of its file, which counts once a row names it.

    Raises ServerError where noise of earlier rounds is lost or damaged, PolicyError for noise beyond 64 bits.
    """
    with services.database.read() as session:
        current = session.get_one(Round, round_id)
        task = session.get_one(Task, current.task_id)
        manifest = decode_manifest(session.get_one(BundleRow, task.bundle).manifest)
        settings = request_of(task).differential_privacy
        before = _last(session, task.task_id, len(settings.coefficients) - 1)
    layout = plan_layout(read_plan(current), manifest)
    if layout.length > MAX_ELEMENTS:
        raise ServerError(f"mechanism 'correlated': updates of {layout.length} elements are more than {MAX_ELEMENTS}")
    # Read when its turn comes: all of it together is as large as two models for each coefficient.
    noise = draw_noise(settings, layout, (_read(services, task.task_id, *each) for each in before))
    services.spool.open_round(task.task_id)
    nonce = secrets.token_bytes(_NONCE)
    sealed = nonce + _cipher(services).encrypt(nonce, noise.astype("<i8").tobytes(), _bound_to(task.task_id, round_id))
    return services.spool.keep_noise(task.task_id, (sealed,)).digest


def noise_of(services: Services, round_id: str) -> Noise:
    """The noise of a round that has been paid for. Raises ServerError where it is lost or damaged."""
    with services.database.read() as session:
        row = session.scalars(select(PrivacyEvent).where(PrivacyEvent.round_id == round_id)).one()
    return _read(services, row.task_id, round_id, row.noise or "")


def forget(services: Services, task_id: str, settings: DifferentialPrivacy) -> None:
    """Delete what no round needs any more, after the newest one's row is committed: mostly one file, and those that a
    kill has left before."""
    # The newest round's own stays, in case it is aggregated again.
    kept = max(len(settings.coefficients) - 1, 1)
    with services.database.read() as session:
        old = _last(session, task_id, kept + MAX_BANDS)[kept:]
    services.spool.drop(task_id, [noise_name(digest) for _, digest in old])


def check_kept(services: Services, task: Task) -> None:
    """Raise ServerError where the task's next round lacks noise of earlier ones. Before any device works for it."""
    settings = request_of(task).differential_privacy
    if not settings.is_correlated:
        return
    with services.database.read() as session:
        needed = [digest for _, digest in _last(session, task.task_id, len(settings.coefficients) - 1)]
    if needed and not services.spool.has_noise(task.task_id, needed):
        raise ServerError(
            "noise of the task's earlier rounds is lost, as after a restore, since backups do not have it; create "
            "another task"
        )


def come_again(session: Session, task: Task, round_id: str) -> str:
    """Why the round's sum cannot be paid for: a device of it was in one of the last sums. "" where none was.

    The selection takes no such device, so this tells that something else went wrong.
    """
    again = select(func.count()).where(
        Answer.round_id == round_id, Answer.phase.in_(UPDATE_PHASES), Answer.device_id.in_(in_last_sums(task))
    )
    count = session.scalar(again) or 0
    separation = request_of(task).differential_privacy.separation or 1
    return f"noise: {count} of the round's devices were in a sum less than {separation} sums ago" if count else ""


def _last(session: Session, task_id: str, count: int) -> list[tuple[str, str]]:
    """The newest rounds of the task that have noise, the newest first, with the digests of their files."""
    query = select(PrivacyEvent.round_id, PrivacyEvent.noise).where(PrivacyEvent.task_id == task_id)
    rows = session.execute(query.order_by(PrivacyEvent.number.desc()).limit(count))
    return [(row.round_id, row.noise or "") for row in rows]


def _read(services: Services, task_id: str, round_id: str, digest: str) -> Noise:
    sealed = services.spool.read_noise(task_id, digest)
    try:
        data = _cipher(services).decrypt(sealed[:_NONCE], sealed[_NONCE:], _bound_to(task_id, round_id))
    except (InvalidTag, ValueError):
        raise ServerError(
            f"the noise of round {round_id} was sealed with another server's key; cancel the task, and create another"
        ) from None
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False)


def _cipher(services: Services) -> AESGCM:
    return AESGCM(services.settings.noise_key)


def _bound_to(task_id: str, round_id: str) -> bytes:
    return f"{task_id}/{round_id}".encode()
