"""Tensors that are in the cache are not fetched again, from the real server; and nothing that it says can do harm."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel.client.cache import Cache
from archipel.client.pieces import MAX_FETCHES, PieceDownload
from archipel.client.session import DeviceSession
from archipel.converter import convert
from archipel.errors import ClientError, DigestError, MessageError, RefusedError, UnreachableError
from archipel.protocol.messages import Piece, Pieces
from archipel.protocol.sealed import decode, encode, public_bytes
from archipel.server.models import Blob
from archipel.training import losses, optimizers

LIMIT = 64 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 30)


@pytest.fixture
def agent(federation: Any) -> Iterator[Any]:
    agent = federation.agent(0)
    agent.run_once()
    agent._transport.traffic.take()
    return agent


@pytest.fixture
def keep(federation: Any) -> Callable[[bytes], str]:
    """Store weights on the server as a round's are; their digest."""

    def store(data: bytes) -> str:
        services = federation.server._services
        digest = str(services.blobs.put(data))
        with services.database.write() as session:
            session.merge(Blob(digest=digest, kind="weights", size=len(data), created=time.time()))
        return digest

    return store


def model(head: int = 0, backbone: int = 0) -> dict[str, np.ndarray]:
    """2 MB in 20 tensors, and a head of 2.6 kB."""
    rng, own = np.random.default_rng(backbone), np.random.default_rng(head)
    made = {f"backbone{n}": rng.standard_normal((100, 256)).astype(np.float32) for n in range(20)}
    return {**made, "head": own.standard_normal((64, 10)).astype(np.float32)}


def received(agent: Any) -> int:
    traffic = agent._transport.traffic.take()
    return int(traffic.received + traffic.headers_received + traffic.sent + traffic.headers_sent)


def test_a_version_that_differs_in_one_tensor_costs_that_tensor(agent: Any, cache: Cache, keep: Any) -> None:
    data = [b.write_weights(model(head)) for head in range(3)]
    costs = []
    for weights in data:
        digest = keep(weights)
        found = cache.weights(digest, PieceDownload(agent._session, cache.folders), LIMIT)
        assert b.write_weights(found) == weights
        costs.append(received(agent))
    assert costs[0] > len(data[0])
    # Headers and the list of pieces among it.
    assert max(costs[1:]) < 0.01 * len(data[0]), costs


def test_all_tensors_changed_costs_a_question(agent: Any, cache: Cache, keep: Any) -> None:
    costs = []
    for backbone in range(2):
        weights = b.write_weights(model(backbone=backbone))
        cache.weights(keep(weights), PieceDownload(agent._session, cache.folders), LIMIT)
        costs.append(received(agent))
    assert 0 < costs[1] - costs[0] < 0.002 * len(weights)


@pytest.fixture
def versions(federation: Any) -> list[str]:
    """Two bundles of one network whose last layer differs."""
    digests = []
    for seed in (1, 2):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        torch.manual_seed(seed)
        network[4].reset_parameters()
        folder = federation.folder / f"version-{seed}"
        convert(
            network, folder, example=torch.zeros(2, 64), loss=losses.cross_entropy(), optimizer=optimizers.sgd(lr=0.1),
            strategy="fedavg", sign_key=federation.publisher_key,
        )  # fmt: skip
        b.pack(folder, folder.with_suffix(".bundle"))
        digests.append(federation.operator.upload_bundle(folder.with_suffix(".bundle")).digest)
    return digests


def test_a_new_bundle_with_the_same_backbone(
    federation: Any, agent: Any, cache: Cache, keep: Any, versions: list[str]
) -> None:
    keys = [public_bytes(federation.publisher_key)]
    costs = []
    for digest in versions:
        bundle = cache.bundle(digest, keys, PieceDownload(agent._session, cache.folders), LIMIT)
        assert bundle.digest == digest
        costs.append(received(agent))
    assert costs[1] < 0.35 * costs[0], costs
    # And a bundle's own parameters as weights: nothing of the large tensors comes again.
    manifest_weights = b.write_weights(dict(bundle.parameters()))
    cache.weights(keep(manifest_weights), PieceDownload(agent._session, cache.folders), LIMIT)
    assert received(agent) < 0.05 * len(manifest_weights)


def test_an_interrupted_file_is_continued_and_a_damaged_one_made_anew(
    agent: Any, cache: Cache, keep: Any, tmp_path: Path
) -> None:
    first, second = b.write_weights(model(0)), b.write_weights(model(1))
    cache.weights(keep(first), PieceDownload(agent._session, cache.folders), LIMIT)
    digest = keep(second)
    part = tmp_path / "cache" / "parts" / digest
    for length in (0, 5, 100, 3000, 1_000_000, len(second) - 1):
        part.write_bytes(second[:length])
        received(agent)
        cache.weights(digest, PieceDownload(agent._session, cache.folders), LIMIT)
        assert received(agent) < 0.01 * len(second)
        (tmp_path / "cache" / "blobs" / digest).unlink()
    part.write_bytes(b"x" * 70_000)
    cache.weights(digest, PieceDownload(agent._session, cache.folders), LIMIT)
    assert received(agent) > len(second)


def test_a_damaged_file_of_the_cache_is_no_source(agent: Any, cache: Cache, keep: Any, tmp_path: Path) -> None:
    first, second = b.write_weights(model(0)), b.write_weights(model(1))
    digest = keep(first)
    cache.weights(digest, PieceDownload(agent._session, cache.folders), LIMIT)
    path = tmp_path / "cache" / "blobs" / digest
    damaged = bytearray(path.read_bytes())
    damaged[500_000] ^= 1
    path.write_bytes(bytes(damaged))
    received(agent)
    found = cache.weights(keep(second), PieceDownload(agent._session, cache.folders), LIMIT)
    assert b.write_weights(found) == second
    assert received(agent) < 0.1 * len(second)


class Liar:
    """The agent's session, but for what it says of pieces."""

    def __init__(self, session: DeviceSession, says: Callable[[Pieces], Any]) -> None:
        self._session = session
        self._says = says
        self.fetched = 0

    def call(self, method: str, path: str, kind: Any) -> Any:
        said = self._says(self._session.call(method, path, kind))
        # As over the wire.
        return said if isinstance(said, Pieces) else decode("pieces", said, Pieces)

    def download(self, *arguments: Any, **options: Any) -> None:
        self.fetched += 1
        self._session.download(*arguments, **options)


def moved(pieces: Pieces) -> Pieces:
    """Each piece is said to be where its neighbour is."""
    offsets = [piece.offset for piece in pieces.pieces]
    turned = offsets[1:] + offsets[:1]
    return Pieces(
        size=pieces.size,
        pieces=[
            Piece(offset=offset, length=piece.length, sha256=piece.sha256)
            for offset, piece in zip(turned, pieces.pieces, strict=True)
        ],
    )


def changed(**changes: Any) -> Callable[[Pieces], Pieces]:
    def change(pieces: Pieces) -> Pieces:
        return Pieces(
            size=changes.get("size", pieces.size),
            pieces=[
                Piece(**{"offset": p.offset, "length": p.length, "sha256": p.sha256, **changes.get("piece", {})})
                for p in pieces.pieces
            ],
        )

    return change


LIES: dict[str, Callable[[Pieces], Any]] = {
    "in another place": moved,
    "shorter than it is": changed(size=70_000),
    "longer than it is": changed(size=3_000_000),
    "larger than the limit": changed(size=2**53 - 1),
    "empty": changed(size=0),
    "all the same place": changed(piece={"offset": 0}),
    "beyond the file": changed(piece={"offset": 2**53 - 1}),
    "other digests": changed(piece={"sha256": "0" * 64}),
    "other lengths": changed(piece={"length": 100}),
    "none": lambda pieces: Pieces(size=pieces.size, pieces=[]),
    "many": lambda pieces: Pieces(
        size=pieces.size,
        pieces=[Piece(offset=n * 20, length=10, sha256=pieces.pieces[0].sha256) for n in range(4096)],
    ),
}


# The test server leaves a file to the collector where a client hangs up on its answer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("lie", LIES)
def test_lies_cost_a_download_and_no_more(agent: Any, cache: Cache, keep: Any, lie: str) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.folders), LIMIT)
    second = b.write_weights(model(1))
    liar: Any = Liar(agent._session, LIES[lie])
    received(agent)
    found = cache.weights(keep(second), PieceDownload(liar, cache.folders), LIMIT)
    assert b.write_weights(found) == second
    assert received(agent) < 2.2 * len(second)
    assert liar.fetched <= MAX_FETCHES + 1


@pytest.mark.parametrize(
    "error", [RefusedError(404, "not_found", "no such route"), UnreachableError("cut"), RefusedError(503, "x", "later")]
)
def test_a_server_that_does_not_say(agent: Any, cache: Cache, keep: Any, error: Exception) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.folders), LIMIT)

    def refuse(pieces: Pieces) -> Pieces:
        raise error

    second = b.write_weights(model(1))
    liar: Any = Liar(agent._session, refuse)
    assert b.write_weights(cache.weights(keep(second), PieceDownload(liar, cache.folders), LIMIT)) == second


def test_what_the_server_has_must_be_what_was_asked_for(agent: Any, cache: Cache, keep: Any, federation: Any) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.folders), LIMIT)
    second = b.write_weights(model(1))
    digest = keep(second)
    path = federation.server._services.settings.path("blobs") / "blobs" / digest[:2] / digest
    if not path.exists():
        [path] = (federation.folder / "server").rglob(digest)
    path.write_bytes(b.write_weights(model(2)))
    with pytest.raises(DigestError):
        cache.weights(digest, PieceDownload(agent._session, cache.folders), LIMIT)
    with pytest.raises(ClientError, match="the limit here"):
        cache.weights(keep(b.write_weights(model(3))), PieceDownload(agent._session, cache.folders), 100_000)


def test_pieces_are_told_to_devices_alone(federation: Any, agent: Any, versions: list[str]) -> None:
    pieces = agent._session.call("GET", f"/v1/bundles/{versions[0]}/pieces", Pieces)
    file = (federation.folder / "version-1.bundle").read_bytes()
    assert pieces.size == len(file)
    assert len(pieces.pieces) == 2  # the two large matrices
    for piece in pieces.pieces:
        assert hashlib.sha256(file[piece.offset : piece.offset + piece.length]).hexdigest() == piece.sha256
    with pytest.raises(RefusedError) as caught:
        agent._session.call("GET", f"/v1/blobs/{'0' * 64}/pieces", Pieces)
    assert caught.value.status == 404
    with pytest.raises(RefusedError) as caught:
        agent._transport.call("GET", f"/v1/bundles/{versions[0]}/pieces", Pieces)
    assert caught.value.status == 401


def test_strictly_decoded() -> None:
    good = Pieces(size=10, pieces=[Piece(offset=0, length=4, sha256="a" * 64)])
    text = encode(good)
    assert decode("pieces", text, Pieces) == good
    for wrong in (
        text.replace(b'"length":4', b'"length":0'),
        text.replace(b'"length":4', b'"length":-1'),
        text.replace(b'"offset":0', b'"offset":-1'),
        text.replace(b"a" * 64, b"A" * 64),
        text.replace(b'"size":10', b'"size":10,"more":1'),
        text.replace(b'"size":10', b'"size":1e30'),
        encode(Pieces(size=10, pieces=good.pieces * 4097)),
        text[:-1],
    ):
        with pytest.raises(MessageError):
            decode("pieces", wrong, Pieces)


def test_a_round_fetches_the_bundles_tensors_once(federation: Any, versions: list[str]) -> None:
    """The first round's weights are those of its bundle."""
    data = {"input": np.zeros((4, 64), np.float32), "label": np.zeros(4, np.int64)}
    agents = [federation.agent(number, examples=lambda: data) for number in range(3)]
    task = federation.task(bundle=versions[0], cohort=3, min_cohort=3, threshold=3)
    federation.run(agents, lambda: federation.operator.task(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    size = (federation.folder / "version-1.bundle").stat().st_size
    assert all(agent.rounds[0].received < 1.1 * size + 20_000 for agent in agents)
