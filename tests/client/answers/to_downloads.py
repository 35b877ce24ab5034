"""What the server may answer to a download: a case for each row of docs/agent-answers.md."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from archipel import bundle as b
from archipel.errors import RefusedError
from archipel.protocol import messages as m
from archipel.protocol.sealed import encode
from tests.client.answers.world import NO_ANSWER, World, case
from tests.support.scripted_server import Reply, before, refused


def part(world: World, data: bytes) -> Path:
    """What a download that broke off left."""
    path = world.agent.config.folder / "cache" / "parts" / world.server.weights
    path.write_bytes(data)
    return path


@case("to a download", "200")
def _(world: World) -> None:
    data = world.server.files["weights"]
    path = part(world, b"from before")
    world.answers("weights", lambda reply: Reply(200, data))
    assert world.round().kind == "took_part"
    assert (world.asked("bundle"), world.asked("weights")) == (1, 1)
    assert not path.exists()


@case("to a download", "206 with the part that was asked for")
def _(world: World) -> None:
    part(world, world.server.files["weights"][:20])
    sent = []
    world.answers("weights", lambda reply: sent.append(reply) or reply)
    assert world.round().kind == "took_part"
    assert sent[0].status == 206
    assert len(sent[0].body) == len(world.server.files["weights"]) - 20
    assert world.asked("weights") == 1


@case("to a download", "206 with another part")
def _(world: World) -> None:
    part(world, world.server.files["weights"][:20])
    world.answers("weights", lambda reply: Reply(206, reply.body, {"Content-Range": "bytes 5-9/10"}))
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2


@case("to a download", "416 with the size of the part that is there")
def _(world: World) -> None:
    data = world.server.files["weights"]
    part(world, data)
    world.answers("weights", lambda reply: Reply(416, b"", {"Content-Range": f"bytes */{len(data)}"}))
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 1


@case("to a download", "416 otherwise")
def _(world: World) -> None:
    part(world, world.server.files["weights"] + b"more")
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2


@case("to a download", "no list of the parts that a file has, or a wrong one")
def _(world: World) -> None:
    assert world.round().kind == "took_part"
    cache = world.agent.config.folder / "cache"
    tensor = np.arange(20 << 10, dtype=np.float32)
    (cache / "blobs" / "another").write_bytes(b.write_weights({"a": tensor}))
    shared = hashlib.sha256(tensor.tobytes()).hexdigest()
    piece = m.Piece(offset=0, length=tensor.nbytes, sha256=shared)
    wrong = [m.Pieces(size=size, pieces=[piece]) for size in (tensor.nbytes, 2**40, 1)]
    for change in (before(404), NO_ANSWER[0], *(lambda reply, said=said: Reply(200, encode(said)) for said in wrong)):
        shutil.rmtree(cache / "bundles" / world.server.bundle)
        world.server.forget()
        world.answers("pieces", *[change] * 4)
        assert world.round().kind == "took_part"
        assert (world.asked("pieces") >= 1, world.asked("bundle")) == (True, 1)


@case("to a download", "other bytes than the plan says")
def _(world: World) -> None:
    path = part(world, b"wrong")
    assert world.round().kind == "took_part"
    assert world.asked("weights") == 2
    for step in ("weights", "bundle"):
        world.restart()
        for folder in ("blobs", "bundles"):
            for kept in (world.agent.config.folder / "cache" / folder).iterdir():
                kept.rename(world.folder / f"{step}-{kept.name}")
        world.server.forget()
        world.answers(step, lambda reply: Reply(200, b"wrong"))
        assert world.round().kind == "refused"
        assert world.asked(step) == 1
        assert not path.exists()


@case("to a download", "more bytes than the owner allows")
def _(world: World) -> None:
    world.restart(max_download_bytes=20)
    outcome = world.round()
    assert (outcome.kind, "the limit here is 20" in outcome.reason) == ("refused", True)


@case("to a download", "401")
def _(world: World) -> None:
    world.answers("weights", before(401))
    assert world.round().kind == "took_part"
    assert world.asked("session") == 2


@case("to a download", "no answer")
def _(world: World) -> None:
    short = world.server.files["weights"][:30]
    world.answers("weights", lambda reply: reply.raw()[: -len(reply.body)] + short, before(503))
    with pytest.raises(RefusedError, match="503"):
        world.round()
    assert [entry.step for entry in world.agent.rounds] == ["assigned"]
    assert world.agent.run_once().kind == "took_part"
    assert world.asked("weights") == 3
    assert len(world.agent.rounds) == 1


@case("to a download", "400, 403, 404, 410, another status")
def _(world: World) -> None:
    for status in (400, 403, 404, 410, 418, 302):
        world.answers("bundle", refused(status))
        assert world.round().kind == "refused"
    assert world.asked("advertisement") == 0
