"""A publisher's bundle is to harm a server, or who looks into it there, by the dashboard's page of its inside.

The publisher is one that the server trusts, and chooses every byte of graphs and weights: names that are scripts, a
graph that takes all time or memory, or one that takes over the process that reads it. What stops it: no web process
reads a model; the process that does opens its own files alone, no socket and no program, within limits; what it gives
back is JSON of a bounded size, which the page puts in as text, under a policy without inline scripts. And who may not
read a bundle reads nothing of it here, also where the document is there already.
"""

# ruff: noqa: F401, F811 (fixtures are imported and then arguments)
from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from playwright.sync_api import Browser, expect

from archipel.server.dashboard.insight import process
from tests.server.dashboard.test_insight import fetch
from tests.support.devices import POPULATION
from tests.support.fixtures.chromium import chromium
from tests.support.fixtures.dashboard import served_world, tab
from tests.support.fixtures.insight import models, publish
from tests.support.fixtures.server import (
    bundle_file,
    bundle_maker,
    data_folder,
    empty_database,
    keys,
    server_settings,
    world,
)
from tests.support.fleet import MODEL, Fleet
from tests.support.real_graphs import CNN, sign_cnn
from tests.support.visitors import Visitor, access_token
from tests.support.world import World

SCRIPT = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 1'>"


@pytest.fixture
def visitor(world: World) -> Visitor:
    return Visitor(world, world.operator_token)


@pytest.mark.sampled(every=3)
def test_names_that_are_scripts(world: World, chromium: Browser, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Flatten", ["input"], [f"{SCRIPT}/a"], name=f"{SCRIPT}/{SCRIPT}", doc_string=SCRIPT),
        helper.make_node("MatMul", [f"{SCRIPT}/a", SCRIPT], ["output"], name=f"{SCRIPT}/b"),
    ]
    ends = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1, 10, 10]),
        helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 5]),
    ]
    weights = onnx.numpy_helper.from_array(np.ones((100, 5), np.float32), SCRIPT)
    graph = helper.make_graph(nodes, SCRIPT, ends[:1], ends[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name=SCRIPT)
    file = sign_cnn(tmp_path, world.keys.publisher, "evil", graphs={"predict": model.SerializeToString()})
    digest = publish(world, file)
    fleet = Fleet(world)
    fleet.post("models", {"name": MODEL, "population": POPULATION}, 201)
    fleet.post(f"models/{MODEL}/versions", {"bundle": digest}, 201)
    with served_world(world) as address, tab(chromium, address) as at:
        at.log_in(world.operator_token)
        page = at.open(f"/dashboard/models/{MODEL}/versions/1/insight")
        # No script and no style but files of the server: a script that got in would not run.
        policy = page.request.get(page.url).headers["content-security-policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        expect(page.locator(".box").first).to_be_visible(timeout=60_000)
        page.get_by_role("button", name="Unfold all").click()
        page.locator(".box.node").first.click()
        page.locator("#search").fill("img")
        assert SCRIPT in page.locator(".found").inner_text()
        for view in page.get_by_role("navigation", name="Views").get_by_role("link").all():
            view.click()
            assert page.evaluate("window.taken") is None
            assert page.locator("img, script:not([src])").count() == 0


HOARD = "held = [bytearray(1 << 20) for _ in range(200)]; open('document.json', 'w').write('{}')"
GREEDY = {"MEMORY_BYTES": ("write_document(request)", HOARD),
          "CPU_SECONDS": ("write_document(request)", "while True: pass"),
          "SECONDS": ("write_document(request)", "import time; time.sleep(60)")}  # fmt: skip


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("limit", list(GREEDY))
def test_a_model_that_takes_all_there_is(
    world: World, visitor: Visitor, models: list[str], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """As if a graph had made the libraries that read it do this."""
    monkeypatch.setattr(process, "_START", process._START.replace(*GREEDY[limit]))
    monkeypatch.setattr(process, limit, {"MEMORY_BYTES": 64 << 20, "CPU_SECONDS": 1.0, "SECONDS": 1}[limit])
    begun = time.monotonic()
    problem = fetch(visitor, f"/dashboard/insight/bundles/{models[0]}/weights", 422)["problem"]
    assert "more than the server has for it" in problem
    assert time.monotonic() - begun < 30
    assert visitor.get("/dashboard/").status_code == 200
    # It is not tried again with each visit.
    assert visitor.get(f"/dashboard/insight/bundles/{models[0]}/weights").status_code == 422


TRIES = """
import json, socket, subprocess
def tried(what):
    try:
        return repr(what())[:200]
    except BaseException as error:
        return type(error).__name__
with open("document.json", "w") as file:
    json.dump({
        "key": tried(lambda: open(KEY, "rb").read()),
        "database": tried(lambda: open(KEY.replace("server.key", "archipel.db"), "rb").read(10)),
        "other": tried(lambda: open(OTHER, "rb").read(4)),
        "write": tried(lambda: open(OTHER, "ab").close()),
        "socket": tried(lambda: socket.create_connection(("127.0.0.1", PORT), 2)),
        "program": tried(lambda: subprocess.run(["/bin/true"])),
        "own": tried(lambda: len(open(asked["models"][0]["bundle"], "rb").read(4))),
        "environment": sorted(os.environ),
    }, file)
"""


@pytest.mark.sampled(every=3)
def test_a_process_that_was_taken_over_reaches_nothing_else(
    world: World, visitor: Visitor, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        known = (
            f"KEY = {str(world.settings.path('server.key'))!r}\nPORT = {listening.getsockname()[1]}\n"
            f"OTHER = {str(world.settings.path('server.toml'))!r}\nasked = json.loads(request)\n"
        )
        monkeypatch.setattr(process, "_START", process._START.replace("write_document(request)", known + TRIES))
        found = fetch(visitor, f"/dashboard/insight/bundles/{models[0]}/weights")
    assert found.pop("own") == "4"
    assert set(found.pop("environment")) <= {"OPENBLAS_NUM_THREADS", "LC_CTYPE"}
    assert set(found.values()) <= {"PermissionError", "BlockingIOError", "OSError"}, found


LINKS = {
    "a link to a secret": "os.symlink({key!r}, 'document.json')",
    "a link of a problem": "os.symlink({key!r}, 'problem.txt')",
    "a pipe": "os.mkfifo('document.json')",
    "too much": "open('document.json', 'wb').truncate(asked['most_bytes'] + 1)",
    "nothing": "pass",
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("what", list(LINKS))
def test_what_it_gives_back_is_a_plain_file_of_a_bounded_size(
    world: World, visitor: Visitor, models: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    code = "asked = json.loads(request)\n" + LINKS[what].format(key=str(world.settings.path("server.key")))
    # Without the confinement, which would stop some of it earlier.
    start = process._START.replace("restrict(reads, [os.getcwd()])", "").replace("write_document(request)", code)
    monkeypatch.setattr(process, "_START", start)
    problem = fetch(visitor, f"/dashboard/insight/bundles/{models[0]}/weights", 422)["problem"]
    assert problem == process.TOO_MUCH


@pytest.mark.sampled(every=3)
def test_who_may_not_read_a_bundle_reads_nothing_of_it(world: World, visitor: Visitor, models: list[str]) -> None:
    path = f"/dashboard/insight/bundles/{models[0]}"
    fetch(visitor, f"{path}/weights")
    stranger = Visitor(world, access_token(world, "operator", populations=["elsewhere"])[0])
    nobody = Visitor(world)
    for each in (f"{path}/weights", path, f"{path}?with={models[1]}", f"/dashboard/models/{MODEL}/versions/1/insight"):
        assert stranger.get(each).status_code == 404
        assert nobody.get(each).status_code == 303
    # One's own bundle is no way to another's.
    own = publish_elsewhere(world, models)
    assert stranger.get(f"/dashboard/insight/bundles/{own}?with={models[0]}").status_code == 404
    assert stranger.get(f"/dashboard/insight/bundles/{own}?weights={models[0]}").status_code == 404


def publish_elsewhere(world: World, models: list[str]) -> str:
    file = sign_cnn(world.settings.path("."), world.keys.publisher, "elsewhere")
    status, answer = world.operator("POST", "/v1/bundles?population=elsewhere", file.read_bytes())
    assert status == 201, answer
    assert answer["digest"] not in models
    return str(answer["digest"])
