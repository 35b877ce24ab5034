"""A form with one file, read as it comes: nothing of the file is taken before the form has shown that it is the
session's own, and nothing of it is kept here."""

from __future__ import annotations

from collections.abc import Iterator

from flask import request
from werkzeug.sansio.multipart import Data, Epilogue, Event, Field, File, MultipartDecoder, NeedData, Preamble

from archipel.server.dashboard.browsers import require_token
from archipel.server.http.api.bundles import body_chunks, declared_length
from archipel.server.http.problems import refuse
from archipel.server.storage.received import CHUNK_BYTES

FORM_BYTES = 4096
"""What the form may have around the file."""
MAX_TOKEN_BYTES = 256
FIELD = "bundle"


def read_file_form(csrf: str, most: int) -> Iterator[bytes]:
    """The bytes of the file in the request's form, which has the field `csrf` and then the file `bundle`.

    `most` bytes may the file have. Raises ApiError 400, 411, 413, 415 or 422 for what is no such form, and 403 if the
    form is not of the session with the token `csrf`; the iterator raises 400 if the form ends early or goes on.
    """
    boundary = request.mimetype_params.get("boundary", "")
    if request.mimetype != "multipart/form-data" or not boundary:
        raise refuse(415, "expected a form with a file; send it from the dashboard's page")
    length = declared_length(most + FORM_BYTES)
    events = _read_events(MultipartDecoder(boundary.encode(), 2 * CHUNK_BYTES, max_parts=2), body_chunks(length))
    part = next(events)
    given = b""
    for data in _part(events) if isinstance(part, Field) and part.name == "csrf" else ():
        given += data
        if len(given) > MAX_TOKEN_BYTES:
            break
    require_token(given, csrf)
    part = next(events)
    if not isinstance(part, File) or part.name != FIELD:
        raise refuse(400, f"the form has no file {FIELD!r}")
    if not part.filename:
        raise refuse(422, "no file was chosen; choose a .bundle file")
    return _whole(events)


def _whole(events: Iterator[Event]) -> Iterator[bytes]:
    yield from _part(events)
    if not isinstance(next(events), Epilogue):
        raise refuse(400, "the form goes on after its file")


def _part(events: Iterator[Event]) -> Iterator[bytes]:
    """The bytes of the part that has just begun."""
    for event in events:
        if not isinstance(event, Data):
            break
        if event.data:
            yield event.data
        if not event.more_data:
            return
    raise refuse(400, "the form is broken: a part of it has no end")


def _read_events(decoder: MultipartDecoder, chunks: Iterator[bytes]) -> Iterator[Event]:
    """The parts of the form and their data; ends with an Epilogue or an ApiError."""
    while True:
        try:
            event = decoder.next_event()
        except ValueError as error:
            raise refuse(400, f"the form is broken: {error}") from None
        if isinstance(event, NeedData):
            decoder.receive_data(next(chunks, None))
        elif not isinstance(event, Preamble):
            yield event
            if isinstance(event, Epilogue):
                return
