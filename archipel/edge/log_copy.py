"""Copies the root's weights log, so that the devices of an edge server read it there."""

from __future__ import annotations

from archipel.client.device import SiteRound
from archipel.errors import ProvenanceError
from archipel.protocol.messages import Endorsement, WeightsLog, WeightsStatement
from archipel.protocol.sealed import encode, unseal
from archipel.server.rounds.sites.mirroring import LogEntry, newest_entry, store_entries
from archipel.server.services import Services


def copy_log(services: Services, given: SiteRound) -> None:
    """Fetch what the log of the round's bundle has more than this server, with the evidence of each secure step.

    The agent has checked the entries that its round depends on; each device checks them again. Raises ProvenanceError,
    CertificateError or MessageError for entries that the root did not seal or that do not follow one another, and what
    the session raises.
    """
    record, bundle = given.of_log, given.bundle.digest
    url = f"/v1/populations/{record.population}/weights-log/{bundle}"
    while True:
        with services.database.read() as session:
            newest = newest_entry(session, record.population, bundle)
        page = given.session.call("GET", f"{url}?after={newest}", WeightsLog)
        if not page.entries:
            return
        entries: list[LogEntry] = []
        for sealed in page.entries:
            newest += 1
            said = unseal("weights", sealed, record.server_key, WeightsStatement)
            if (said.population, said.bundle, said.number) != (record.population, bundle, newest):
                raise ProvenanceError(f"weights log of bundle {bundle[:16]}...: entry {newest} is another one")
            evidence = None
            if said.kind == "step" and said.privacy == "secure":
                shown = given.session.call("GET", f"{url}/{said.number}/endorsement", Endorsement)
                evidence = encode(shown)
            entries.append(LogEntry(said, sealed, evidence))
        store_entries(services, entries)
