"""Bundles and weights: operators upload bundles, and devices and people download bundles and weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from flask import Response, request, send_file

from archipel.bundle import Manifest, encode_manifest, open_bundle
from archipel.errors import BundleError, DevelopmentKeyError, SignatureError
from archipel.protocol.messages import Message, Name, Pieces
from archipel.protocol.operator.tasks import BundleInfo, BundlePage, BundleQuery
from archipel.server.audit import log as audit
from archipel.server.database.tables import BundleRow
from archipel.server.http.paging import page
from archipel.server.http.problems import refuse
from archipel.server.http.routes import DEVICE, OPERATOR, READ, Call, Route
from archipel.server.rounds import reach
from archipel.server.storage.blob_rows import describe_deleted, record_blob
from archipel.server.storage.received import CHUNK_BYTES

_UNPACKED = re.compile(r"/\S*/\.unpack-[^/]+/bundle(?:/([^\s:]+))?")


class UploadQuery(Message, frozen=True, kw_only=True):
    """`population` is the one that the bundle is for."""

    population: Name | None = None


def publish_bundle(call: Call[None]) -> tuple[BundleInfo, int]:
    """Store a signed .bundle file for a population; the same bundle again changes nothing."""
    named: str | None = call.query.population
    if named is not None:
        call.identity.require(named)
    length = declared_length(call.services.settings.max_bundle_bytes)
    return store_bundle(call, body_chunks(length), named)


def store_bundle(call: Call[None], chunks: Iterator[bytes], named: str | None) -> tuple[BundleInfo, int]:
    """Store the file of these bytes for the population `named`, or for all of the token's."""
    services = call.services
    written = services.blobs.receive(chunks)
    try:
        try:
            # Verified before it is kept: an upload that is no bundle never becomes a blob.
            settings = services.settings
            bundle = open_bundle(
                written.temporary, settings.trusted_keys, settings.bundle_folder,
                allow_development=settings.allow_development,
            )  # fmt: skip
        except BundleError as error:
            why = _plain(error, written.temporary)
            raise refuse(422, f"the body is not a bundle that this server accepts: {why}") from None
        populations = _target_populations(call, bundle.manifest, named)
        with services.database.read() as session:
            # A bundle that is there keeps the file of its first upload, which its row names.
            stored = session.get(BundleRow, bundle.digest)
        # The file is in place before a row names it.
        if stored is None:
            services.blobs.keep(written)
    finally:
        written.discard()
    now = services.clock()
    row = BundleRow(
        digest=bundle.digest,
        file_digest=written.digest,
        name=bundle.manifest.name,
        size=written.size,
        strategy=bundle.manifest.strategy,
        manifest=encode_manifest(bundle.manifest),
        published=now,
    )
    with services.database.write() as session:
        known = session.get(BundleRow, bundle.digest)
        bound = [each for each in populations if reach.is_bound(session, row.digest, each)]
        # Nothing is new, neither the bundle nor a population that may read it.
        if known is not None and (len(bound) == len(populations) or not populations):
            return _info(known), 200
        if known is None:
            record_blob(session, services.blobs, digest=written.digest, kind="bundle", size=written.size, now=now)
            session.add(row)
            session.flush()
        for population in populations:
            reach.extend(session, population, reach.OF_UPLOAD, row.digest)
        audit.append(
            session, now, call.identity.actor, "bundle.publish", row.digest, name=row.name, bytes=row.size,
            populations=" ".join(populations) or None,
        )  # fmt: skip
    return _info(row if known is None else known), 201


def _target_populations(call: Call[None], manifest: Manifest, named: str | None) -> list[str]:
    """The populations that an upload is for: the `named` one, else all of the token's that the publisher allows.

    With a token for all populations and none named it is for none, until somebody with such a token uses it in a task
    or a version. Raises ApiError 422 if the publisher allows none of them.
    """
    populations = sorted(call.identity.populations or ()) if named is None else [named]
    allowed = [each for each in populations if not manifest.populations or each in manifest.populations]
    if populations and not allowed:
        raise refuse(422, f"its publisher made the bundle for {list(manifest.populations)}, not for {populations[0]!r}")
    return allowed


def list_bundles(call: Call[None]) -> BundlePage:
    """Bundles, newest first."""
    query: BundleQuery = call.query
    where = reach.visible_bundles(call.identity)
    with call.services.database.read() as session:
        rows, after = page(
            session, BundleRow, BundleRow.published, BundleRow.digest, query, where, newest_first=True
        )  # fmt: skip
        return BundlePage(items=[_info(row) for row in rows], next=after)


def download_bundle(call: Call[None], digest: str) -> Response:
    """The .bundle file; ranges and ETag are honoured, so that a device can resume."""
    return _file(call, find_bundle_file(call, digest), digest, "application/zip")


def bundle_pieces(call: Call[None], digest: str) -> bytes:
    """Parts of the .bundle file that other files may have too: tensors, parts of graphs. Fetch the rest by ranges."""
    return call.services.pieces.of(find_bundle_file(call, digest))


def download_blob(call: Call[None], digest: str) -> Response:
    """Weights (safetensors) by digest; ranges and ETag are honoured. 410: the server keeps them no longer."""
    check_blob(call, digest)
    return _file(call, digest, digest, "application/octet-stream")


def blob_pieces(call: Call[None], digest: str) -> bytes:
    """Parts of the weights that other files may have too, mostly tensors. Fetch the rest by ranges."""
    check_blob(call, digest)
    return call.services.pieces.of(digest)


def find_bundle_file(call: Call[None], digest: str) -> str:
    """The digest of the .bundle file. Raises ApiError 404 where there is none for the caller."""
    with call.services.database.read() as session:
        file_digest = reach.file_of_bundle(session, call.identity, digest, call.services.clock())
    if file_digest is None:
        raise refuse(404, f"no bundle {digest}")
    return file_digest


def check_blob(call: Call[None], digest: str) -> None:
    with call.services.database.read() as session:
        blob = reach.find_blob(session, call.identity, digest, call.services.clock())
    if blob is None:
        raise refuse(404, f"no blob {digest}")
    if blob.deleted is not None:
        raise refuse(410, describe_deleted(digest, blob.deleted, blob.why))


def declared_length(limit: int) -> int:
    """Content-Length of an upload, checked before anything is read. Raises ApiError 411 or 413."""
    length = request.content_length
    if length is None:
        raise refuse(411, "an upload needs a Content-Length header")
    if length > limit:
        raise refuse(413, f"{length} bytes, the limit is {limit}")
    return length


def body_chunks(length: int) -> Iterator[bytes]:
    """The request's body of exactly `length` bytes, as a stream. Raises ApiError 400 when it ends early."""
    # Flask's limit for bodies is that of JSON. `length` was checked against the limit of uploads.
    request.max_content_length = length
    left = length
    while left:
        chunk = request.stream.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise refuse(400, f"the body ended after {length - left} of {length} bytes")
        left -= len(chunk)
        yield chunk


def _file(call: Call[None], blob: str, etag: str, mimetype: str) -> Response:
    # `send_file` opens the file in this block. The open file stays readable if a cache evicts it afterwards.
    with call.services.blobs.open(blob) as path:
        return send_file(path, mimetype, conditional=True, etag=etag, last_modified=None, max_age=31536000)


def _info(row: BundleRow) -> BundleInfo:
    return BundleInfo(digest=row.digest, name=row.name, bytes=row.size, strategy=row.strategy, published=row.published)


def _plain(error: BundleError, received: Path) -> str:
    # Paths of the server's temporary files are replaced: they mean nothing to the sender.
    text = str(error).replace(str(received), "the bundle")
    text = _UNPACKED.sub(lambda found: found[1] or "the bundle", text)
    if isinstance(error, DevelopmentKeyError):
        return (
            "signed with a development key, which is for trying out only; sign it with a key of `archipel keys FILE`, "
            "or set `allow_development = true` in server.toml"
        )
    if isinstance(error, SignatureError):
        return f"{text}; add its publisher's key to `publisher_keys` in server.toml"
    return text


ROUTES = (
    Route(
        "POST",
        "/v1/bundles",
        OPERATOR,
        publish_bundle,
        response=BundleInfo,
        status=201,
        query=UploadQuery,
        takes="application/zip",
    ),
    Route("GET", "/v1/bundles", READ, list_bundles, response=BundlePage, query=BundleQuery),
    Route("GET", "/v1/bundles/<digest:digest>", DEVICE | READ, download_bundle, gives="application/zip"),
    Route("GET", "/v1/blobs/<digest:digest>", DEVICE | READ, download_blob, gives="application/octet-stream"),
    Route("GET", "/v1/bundles/<digest:digest>/pieces", DEVICE | READ, bundle_pieces, response=Pieces),
    Route("GET", "/v1/blobs/<digest:digest>/pieces", DEVICE | READ, blob_pieces, response=Pieces),
)
