"""Somebody hands on a model that harms whoever looks into it with `archipel insight`: names that are scripts, more
nodes than memory holds, weights that lie in other files of the machine, a graph that never ends.

The attacker chooses every byte of an ONNX file, and of the log of a run. What stops it: nodes are counted before
anything is made of them, external data lie beside the file or are refused, times are measured in a process with a
limit, and what a page shows is text in a block of JSON, under a policy that lets the page's own scripts run alone.
"""

# ruff: noqa: F811 (fixtures are imported and then arguments)
from __future__ import annotations

import http.client
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Browser
from tensorboardX import SummaryWriter

from archipel.errors import ArchipelError, ModelImportError
from archipel.insight import Page, PageServer, measure_times, read_onnx, read_run, render
from tests.support.fixtures.chromium import chromium  # noqa: F401

SCRIPT = "</script><script>window.taken = 1</script><img src=x onerror='window.taken = 1'>"
FLOAT = TensorProto.FLOAT


def save(path: Path, nodes: list[onnx.NodeProto], initializers: list[onnx.TensorProto] | None = None) -> Path:
    ends = [helper.make_tensor_value_info(name, FLOAT, [4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, SCRIPT, ends[:1], ends[1:], initializers or [])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10, producer_name=SCRIPT)
    onnx.save(model, path)
    return path


@pytest.mark.sampled(every=6)
def test_names_that_are_scripts(tmp_path: Path, chromium: Browser) -> None:
    nodes = [
        helper.make_node("Add", ["x", SCRIPT], [f"{SCRIPT}/a"], name=f"{SCRIPT}/{SCRIPT}"),
        helper.make_node("LeakyRelu", [f"{SCRIPT}/a"], ["y"], name="last", alpha=0.5, doc_string=SCRIPT),
    ]
    opened = read_onnx(save(tmp_path / "m.onnx", nodes, [numpy_helper.from_array(np.ones(4, np.float32), SCRIPT)]))
    with SummaryWriter(str(tmp_path / "log")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    run = read_run(tmp_path / "log")
    run.curves[0].name = run.curves[0].group = run.curves[0].run = SCRIPT
    page = Page(title=SCRIPT, version="0", subjects=[opened.subject], curves=run.curves, notes=[SCRIPT])
    text = render(page)
    # Of the tags only the page's own are left: no other script begins, and none ends early.
    assert len(re.findall(r"<script", text)) == len(re.findall(r"</script", text)) == 4
    assert "<img" not in text
    (tmp_path / "page.html").write_text(text)
    told: list[str] = []
    with chromium.new_context(offline=True) as context:
        shown = context.new_page()
        shown.on("console", lambda message: told.append(message.text))
        shown.on("pageerror", lambda error: told.append(str(error)))
        for view in ("overview", "graph", "memory", "weights", "curves"):
            shown.goto(f"file://{tmp_path}/page.html#{view}")
            shown.reload()
            if view == "graph":
                shown.locator(".box.node").first.click()
                shown.locator("#search").fill("img")
                assert SCRIPT in shown.locator(".found").inner_text()
            assert shown.evaluate("window.taken") is None
            assert shown.locator("img").count() == 0
    assert not told


@pytest.mark.sampled(every=3)
def test_a_script_that_got_in_would_not_run(tmp_path: Path, chromium: Browser) -> None:
    text = render(Page(title="page", version="0", notes=["none"]))
    changed = text.replace("</main>", "</main><script>window.taken = 1</script><img src=x onerror='window.taken = 1'>")
    assert changed != text
    (tmp_path / "page.html").write_text(changed)
    with chromium.new_context() as context:
        shown = context.new_page()
        shown.goto(f"file://{tmp_path}/page.html")
        assert shown.evaluate("window.taken") is None


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


@pytest.mark.parametrize("inside", [False, True])
def test_a_million_nodes(tmp_path: Path, inside: bool) -> None:
    node = b"\x0a\x02\x22\x00" * 1_000_000  # each an operator without a name
    if inside:  # in the body of a loop
        attribute = b"\x32" + varint(len(node)) + node
        node = b"\x2a" + varint(len(attribute)) + attribute
        node = b"\x0a" + varint(len(node)) + node
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x3a" + varint(len(node)) + node)
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelImportError, match="more than 100,000 nodes"):
        read_onnx(tmp_path / "m.onnx")
    assert time.monotonic() - begun < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 << 10  # KiB


def test_names_without_end(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="n" * 5_000_000)
    opened = read_onnx(save(tmp_path / "m.onnx", [node]))
    assert len(render(Page(title="m", version="0", subjects=[opened.subject]))) < 1 << 20


@pytest.mark.parametrize("place", ["../secret", "/etc/hostname", "link", "sub/../../secret", ""])
def test_weights_in_other_files(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", place), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    path = save(folder / "m.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], [tensor])
    with pytest.raises(ModelImportError, match=r"m\.onnx"):
        read_onnx(path)


def test_weights_that_take_all_memory(tmp_path: Path) -> None:
    with open(tmp_path / "data", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)  # no disk is used
    tensor = TensorProto(name="w", data_type=FLOAT, dims=[1 << 38], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="data")
    path = save(tmp_path / "m.onnx", [helper.make_node("Add", ["x", "w"], ["y"])], [tensor])
    with pytest.raises(ModelImportError, match="bytes of external data"):
        read_onnx(path)


@pytest.mark.sampled(every=4)
def test_a_graph_that_never_ends(tmp_path: Path) -> None:
    body = onnx.parser.parse_graph(
        "b (int64 i, bool c, float[4] v) => (bool d, float[4] w) { d = Identity (c)  w = Identity (v) }"
    )
    nodes = [
        helper.make_node("Loop", ["", "go", "x"], ["y"], name="endless", body=body),
    ]
    opened = read_onnx(save(tmp_path / "m.onnx", nodes, [numpy_helper.from_array(np.array(True), "go")]))
    begun = time.monotonic()
    measure_times(opened.graphs[0], runs=1, seconds=4)
    assert time.monotonic() - begun < 30
    assert opened.subject.graphs[0].times is None
    assert "took longer than 4 seconds" in opened.subject.graphs[0].notes[-1]


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(lambda: "<!doctype html><title>weights</title>")
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop()
    thread.join()


def ask(server: PageServer, path: str, host: str, method: str = "GET") -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.request(method, path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.sampled(every=3)
def test_other_origins_and_other_users_read_no_page(server: PageServer) -> None:
    path, own = "/" + server.address.split("/", 3)[3], f"127.0.0.1:{server.port}"
    assert ask(server, path, own) == (200, "<!doctype html><title>weights</title>")
    for host in ("attacker.example", f"attacker.example:{server.port}", "127.0.0.1", ""):
        status, text = ask(server, path, host)
        assert status == 421
        assert "weights" not in text
    for other in ("/", path[:-2] + "/", path + "x", "/../etc/passwd"):
        assert ask(server, other, own)[0] == 404
    assert ask(server, path, own, "POST")[0] == 501


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"\xff" * 40, b"\x3a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_model(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(damage)
    with pytest.raises(ArchipelError, match=r"m\.onnx"):
        read_onnx(tmp_path / "m.onnx")
