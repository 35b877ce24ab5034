"""Files made of parts, over connections that break and in processes that are killed: what is there is kept."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archipel import bundle as b
from archipel.client import Agent, AgentConfig
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.piece_index import Place
from archipel.client.downloads.pieces import PieceDownload
from archipel.protocol.messages import Piece
from tests.support.faults import MENDED, Fault, Forward, Handler, Proxy, running
from tests.support.federation import Federation
from tests.support.pieces import LIMIT, model, received

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.client.conftest"])
CHANGED = ("backbone3", "backbone7", "backbone8", "backbone15", "head")


@pytest.fixture
def proxy(federation: Federation) -> Iterator[Proxy]:
    with running(Proxy(federation.server.port)) as made:
        yield made


@pytest.fixture
def versions() -> tuple[bytes, bytes]:
    """Two versions of weights, 2 MB, that differ by 412 kB in four stretches."""
    first = model(0)
    return b.write_weights(first), b.write_weights({**first, **{name: first[name][::-1] for name in CHANGED}})


@pytest.mark.sampled(every=3)
def test_an_interrupted_file_is_continued_and_a_damaged_one_made_anew(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str], tmp_path: Path
) -> None:
    first, second = b.write_weights(model(0)), b.write_weights(model(1))
    cache.weights(keep(first), PieceDownload(agent._session, cache.index), LIMIT)
    digest = keep(second)
    part = tmp_path / "cache" / "parts" / digest
    for length in (0, 5, 100, 3000, 1_000_000, len(second) - 1):
        part.write_bytes(second[:length])
        received(agent)
        cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
        assert received(agent) < 0.01 * len(second)
        (tmp_path / "cache" / "blobs" / digest).unlink()
    # Also where nothing is here that could help.
    shutil.rmtree(tmp_path / "cache" / "blobs")
    (tmp_path / "cache" / "blobs").mkdir()
    part.write_bytes(second)
    cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
    assert received(agent) < 2000
    (tmp_path / "cache" / "blobs" / digest).unlink()
    part.write_bytes(b"x" * 70_000)
    cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
    assert received(agent) > len(second)


@pytest.mark.sampled(every=3)
def test_a_source_that_goes_while_it_is_copied(
    agent: Agent, cache: Cache, keep: Callable[[bytes], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = b.write_weights(model(0)), b.write_weights(model(1))
    source = tmp_path / "cache" / "blobs" / keep(first)
    cache.weights(source.name, PieceDownload(agent._session, cache.index), LIMIT)
    find = cache.index.find
    for cut in (None, 1_000_000):

        def found(wanted: Iterable[Piece], cut: int | None = cut) -> dict[str, Place]:
            places = find(wanted)
            source.unlink() if cut is None else os.truncate(source, cut)
            return places

        with monkeypatch.context() as going:
            going.setattr(cache.index, "find", found)
            digest = keep(second)
            weights = cache.weights(digest, PieceDownload(agent._session, cache.index), LIMIT)
        assert b.write_weights(weights) == second
        (tmp_path / "cache" / "blobs" / digest).unlink()
        source.write_bytes(first)


@pytest.mark.parametrize("fault", sorted(MENDED.keys() - {"dripping"}))
@pytest.mark.sampled(every=6)
def test_every_other_request_meets_a_fault(
    federation: Federation,
    proxy: Proxy,
    cache: Cache,
    keep: Callable[[bytes], str],
    versions: tuple[bytes, bytes],
    fault: str,
) -> None:
    agent = federation.agent(0, server=proxy.url, read_timeout=1.0)
    agent.run_once()
    cache.weights(keep(versions[0]), PieceDownload(agent._session, cache.index), LIMIT)
    asked: list[str] = []
    # Wrong bytes are found at the end: the whole that is fetched then has to be right.
    wrong = fault in ("garbage", "page")

    def once(method: str, path: str) -> Fault | None:
        asked.extend([path] if "/blobs/" in path else [])
        return MENDED[fault] if "/blobs/" in path and len(asked) % 2 and len(asked) < (4 if wrong else 100) else None

    received(agent)
    proxy.fault = once
    found = cache.weights(keep(versions[1]), PieceDownload(agent._session, cache.index), LIMIT)
    assert b.write_weights(found) == versions[1]
    assert len(asked) >= 4
    assert received(agent) < (1.5 if wrong else 0.45) * len(versions[1])


def fetch(config: dict[str, Any], digest: str) -> None:
    with Agent(AgentConfig(**config), examples=dict) as agent:
        agent.run_once()
        cache = agent._device.cache
        session: Any = agent._session
        cache.weights(digest, PieceDownload(session, cache.index), LIMIT)


@pytest.mark.sampled(every=4)
def test_killed_in_every_range(
    federation: Federation, proxy: Proxy, keep: Callable[[bytes], str], versions: tuple[bytes, bytes]
) -> None:
    """With half of the range sent; another process goes on each time."""
    with federation.agent(0, server=proxy.url) as agent:
        config = {name: getattr(agent.config, name) for name in agent.config.__struct_fields__ if name != "attributes"}
    fetch(config, keep(versions[0]))
    digest, sent, process = keep(versions[1]), 0, _FORKS.Process()

    def kill(handler: Handler, forward: Forward) -> None:
        nonlocal sent
        code, headers, body = forward()
        assert code == 206
        handler.answer(code, headers, body, cut=len(body) // 2)
        sent += len(body) // 2
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)

    def count(handler: Handler, forward: Forward) -> None:
        nonlocal sent
        code, headers, body = forward()
        sent += len(body)
        handler.answer(code, headers, body)

    for survived in range(20):
        asked: list[str] = []

        def fault(method: str, path: str, survived: int = survived, asked: list[str] = asked) -> Fault | None:
            if not path.endswith(digest):
                return None
            asked.append(path)
            return kill if len(asked) > min(survived // 2, 1) else count

        proxy.fault = fault
        process = _FORKS.Process(target=fetch, args=(config, digest), daemon=True)
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert survived == 5
    blob = Path(config["folder"]) / "cache" / "blobs" / digest
    assert blob.read_bytes() == versions[1]
    # What a killed process had received, and not yet written, is all that came twice.
    assert sent < 1.25 * 412_000
