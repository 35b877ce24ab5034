"""Tensors that are in the cache are not fetched again, from the real server; and nothing that it says can do harm."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from archipel import bundle as b
from archipel.client import Agent
from archipel.client.connection.session import DeviceSession
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.pieces import MAX_FETCHES, PieceDownload
from archipel.converter import Signing, Training, convert
from archipel.converter.request import DEFAULT_PRIVACY
from archipel.errors import ClientError, DigestError, MessageError, RefusedError, UnreachableError
from archipel.protocol.messages import Piece, Pieces
from archipel.protocol.sealed import decode, encode, public_bytes
from archipel.server.database.tables import Reach
from archipel.server.http import api
from archipel.training import losses, optimizers
from tests.support.faults import Proxy, running
from tests.support.federation import Federation
from tests.support.linear_bundle import POPULATION
from tests.support.pieces import LIMIT, model, received


@pytest.mark.sampled(every=4)
def test_a_version_that_differs_in_one_tensor_costs_that_tensor(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str]
) -> None:
    data = [b.write_weights(model(head)) for head in range(3)]
    costs = []
    for weights in data:
        digest = keep(weights)
        found = cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
        assert b.write_weights(found) == weights
        costs.append(received(agent))
    assert costs[0] > len(data[0])
    # Headers and the list of pieces among it.
    assert max(costs[1:]) < 0.004 * len(data[0]), costs


@pytest.mark.sampled(every=3)
def test_adapters_beside_a_frozen_model_cost_the_adapters(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str]
) -> None:
    costs = []
    for version in range(2):
        rng = np.random.default_rng(version)
        adapters = {
            f"backbone{n}.{half}": rng.standard_normal((100, 2)).astype(np.float32) for n in range(20) for half in "ab"
        }
        weights = b.write_weights({**model(), **adapters})
        found = cache.weights(keep(weights), PieceDownload(agent._session, cache.index), LIMIT)
        assert b.write_weights(found) == weights
        costs.append(received(agent))
    assert sum(array.nbytes for array in adapters.values()) == 32_000
    assert costs[1] < 32_000 + 0.02 * costs[0]


@pytest.mark.sampled(every=3)
def test_all_tensors_changed_costs_a_question(agent: Agent, cache: Cache, keep: Callable[[bytes], str]) -> None:
    costs = []
    for backbone in range(2):
        weights = b.write_weights(model(backbone=backbone))
        cache.weights(keep(weights), PieceDownload(agent._session, cache.index), LIMIT)
        costs.append(received(agent))
    # The list of parts, less the file's header, which is the same.
    assert abs(costs[1] - costs[0]) < 0.002 * len(weights)


@pytest.mark.sampled(every=4)
def test_of_a_small_model_only_the_bundle_is_asked_about(federation: Federation) -> None:
    """And not even that where there is nothing to be found."""
    with running(Proxy(federation.server.port)) as proxy:
        agents = [federation.agent(0, server=proxy.url), federation.agent(1), federation.agent(2)]
        for others in (b"", np.random.default_rng(0).bytes(100_000)):
            cache = agents[0].config.folder / "cache"
            for path in (*(cache / "blobs").iterdir(), *(cache / "bundles").iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            (cache / "blobs" / ("0" * 64)).write_bytes(others)
            proxy.came.clear()
            task = federation.task(cohort=3)
            federation.run(agents, lambda task=task: federation.operator.tasks.get(task.task_id).state != "running")
            assert federation.wait(task).state == "completed"
            paths = [path.split("/")[2] for _, path, _ in proxy.came if path.endswith("/pieces")]
            assert paths == (["bundles"] if others else [])
            assert {"bundles", "blobs"} <= {path.split("/")[2] for _, path, _ in proxy.came}


@pytest.fixture
def versions(federation: Federation) -> list[str]:
    """Two bundles of one network whose last layer differs."""
    digests = []
    for seed in (1, 2):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        torch.manual_seed(seed)
        network[4].reset_parameters()
        folder = federation.folder / f"version-{seed}"
        convert(
            network, folder, example=torch.zeros(2, 64),
            training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), strategy="fedavg"),
            privacy=msgspec.structs.replace(DEFAULT_PRIVACY, min_cohort=3, colluders=0.0),
            signing=Signing(federation.publisher_key),
        )  # fmt: skip
        b.pack(folder, folder.with_suffix(".bundle"))
        digests.append(federation.operator.bundles.upload(folder.with_suffix(".bundle")).digest)
        with federation.server._services.database.write() as session:
            session.add(Reach(digest=digests[-1], population=POPULATION, reason="model"))
    return digests


@pytest.mark.sampled(every=8)
def test_a_new_bundle_with_the_same_backbone(
    federation: Federation, agent: Agent, cache: Cache, keep: Callable[[bytes], str], versions: list[str]
) -> None:
    keys = [public_bytes(federation.publisher_key)]
    costs = []
    for digest in versions:
        bundle = cache.bundle(digest, keys, PieceDownload(agent._session, cache.index), LIMIT)
        assert bundle.digest == digest
        costs.append(received(agent))
    # Half of a kilobyte of this is the last layer; the rest is what names its digests, in a small bundle.
    assert costs[1] < 0.12 * costs[0], costs
    # And a bundle's own parameters as weights: nothing of the tensors comes again.
    manifest_weights = b.write_weights(dict(bundle.parameters()))
    cache.weights(keep(manifest_weights), PieceDownload(agent._session, cache.index), LIMIT)
    assert received(agent) < 0.02 * len(manifest_weights)


@pytest.mark.sampled(every=3)
def test_a_damaged_file_of_the_cache_is_no_source(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str], tmp_path: Path
) -> None:
    first, second = b.write_weights(model(0)), b.write_weights(model(1))
    digest = keep(first)
    cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
    path = tmp_path / "cache" / "blobs" / digest
    damaged = bytearray(path.read_bytes())
    damaged[500_000] ^= 1
    path.write_bytes(bytes(damaged))
    received(agent)
    found = cache.weights(keep(second), PieceDownload(agent._session, cache.index), LIMIT)
    assert b.write_weights(found) == second
    assert received(agent) < 0.1 * len(second)


class Liar:
    """The agent's session, but for what it says of pieces."""

    def __init__(self, session: DeviceSession, says: Callable[[Pieces], Pieces | bytes]) -> None:
        self._session = session
        self._says = says
        self.fetched = 0

    def call(self, method: str, path: str, kind: type[Pieces]) -> Pieces:
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


LIES: dict[str, Callable[[Pieces], Pieces | bytes]] = {
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
@pytest.mark.sampled(every=6)
def test_lies_cost_a_download_and_no_more(agent: Agent, cache: Cache, keep: Callable[[bytes], str], lie: str) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.index), LIMIT)
    second = b.write_weights(model(1))
    liar: Any = Liar(agent._session, LIES[lie])
    received(agent)
    found = cache.weights(keep(second), PieceDownload(liar, cache.index), LIMIT)
    assert b.write_weights(found) == second
    assert received(agent) < 2.2 * len(second)
    assert liar.fetched <= MAX_FETCHES + 1


@pytest.mark.sampled(every=3)
def test_an_older_server(
    federation: Federation, agent: Agent, cache: Cache, keep: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation.server.stop()
    older = tuple(route for route in api.ROUTES["bundles"] if not route.path.endswith("/pieces"))
    monkeypatch.setitem(api.ROUTES, "bundles", older)
    federation.server.start()
    for head in range(2):
        weights = b.write_weights(model(head))
        found = cache.weights(keep(weights), PieceDownload(agent._session, cache.index), LIMIT)
        assert b.write_weights(found) == weights
        assert len(weights) < received(agent) < len(weights) + 5000


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("error", [UnreachableError("cut"), RefusedError(503, "x", "later")])
def test_a_server_that_does_not_say(agent: Agent, cache: Cache, keep: Callable[[bytes], str], error: Exception) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.index), LIMIT)

    def refuse(pieces: Pieces) -> Pieces:
        raise error

    second = b.write_weights(model(1))
    liar: Any = Liar(agent._session, refuse)
    assert b.write_weights(cache.weights(keep(second), PieceDownload(liar, cache.index), LIMIT)) == second


@pytest.mark.sampled(every=3)
def test_what_the_server_has_must_be_what_was_asked_for(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str], federation: Federation
) -> None:
    cache.weights(keep(b.write_weights(model(0))), PieceDownload(agent._session, cache.index), LIMIT)
    second = b.write_weights(model(1))
    digest = keep(second)
    path = federation.server._services.settings.path("blobs") / "blobs" / digest[:2] / digest
    if not path.exists():
        [path] = (federation.folder / "server").rglob(digest)
    path.write_bytes(b.write_weights(model(2)))
    with pytest.raises(DigestError):
        cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
    with pytest.raises(ClientError, match="the limit here"):
        cache.weights(keep(b.write_weights(model(3))), PieceDownload(agent._session, cache.index), 100_000)


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


@pytest.mark.sampled(every=8)
def test_a_round_fetches_the_bundles_tensors_once(federation: Federation, versions: list[str]) -> None:
    """The first round's weights are those of its bundle."""
    data = {"input": np.zeros((4, 64), np.float32), "label": np.zeros(4, np.int64)}
    agents = [federation.agent(number, examples=lambda: data) for number in range(3)]
    task = federation.task(bundle=versions[0], cohort=3, min_cohort=3, threshold=3)
    federation.run(agents, lambda: federation.operator.tasks.get(task.task_id).state != "running")
    assert federation.wait(task).state == "completed"
    size = (federation.folder / "version-1.bundle").stat().st_size
    assert all(agent.rounds[0].received < 1.1 * size + 20_000 for agent in agents)
