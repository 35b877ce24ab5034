"""Training and prediction in a browser's page: `archipel-web` beside TensorFlow.js, in one page of Chromium.

    python benchmarks/browser_training.py --install-peers   once: TensorFlow.js from npm, and the page (needs make web)
    python benchmarks/browser_training.py                   about 5 minutes
    python benchmarks/browser_training.py --quick           the small network alone

Steps of SGD with momentum on a batch of 16 of the demo's network and of ResNet-8, and predictions of one and of 16
examples. Both sides begin with the same weights, and before anything is timed they have to give the same answers and
the same loss. TensorFlow.js runs on each of its backends that trains here: `cpu`, which is JavaScript; `wasm` has no
gradients of convolutions and only predicts; `webgl` is left out where the browser imitates the GPU. archipel runs on
WebAssembly, with one thread, in its worker. The engines take turns; figures are medians, ratios those of the turns.
"""

from __future__ import annotations

import argparse
import base64
import http.server
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measure import Report, Row, arguments

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).resolve().parent / "browser"
DEFAULT_FOLDER = ROOT / ".cache" / "browser-peers"
TENSORFLOW = "4.22.0"
BATCH, LEARNING_RATE = 16, 0.01
BACKENDS = {"train": ("cpu",), "predict": ("cpu", "wasm")}
TRANSPOSED = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
"""From PyTorch's layout of weights to TensorFlow's, by their rank."""


def main() -> int:
    options = parsed()
    if options.install_peers:
        install(options.peers)
        return 0
    site = options.peers / "site"
    if not (site / "page.html").is_file():
        print(
            f"no page in {options.peers}; run: python benchmarks/browser_training.py --install-peers", file=sys.stderr
        )
        return 2
    from playwright.sync_api import sync_playwright

    report = Report(options.json, ("numpy", "playwright"))
    names = ["digits CNN"] if options.quick else ["digits CNN", "ResNet-8"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        shutil.copytree(site, folder, dirs_exist_ok=True)
        tasks = {name: make_task(name, Path(folder)) for name in names}
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        with serving(Path(folder)) as address:
            for name, task in tasks.items():
                page = browser.new_page()
                page.goto(f"{address}page.html")
                page.wait_for_function("() => window.open_ !== undefined")
                report.add(measure(page, name, task, 3.0 if options.quick else 20.0))
                page.close()
        browser.close()
    return 0


def measure(page: Any, name: str, task: dict[str, Any], seconds: float) -> list[Row]:
    """Rows of a network, each of so many seconds: a training step, and predictions of a batch and of one example."""
    rows = []
    for kind, count in (("train", BATCH), ("predict", BATCH), ("predict", 1)):
        engines = {"archipel": {}, **{f"TensorFlow.js {each}": {"backend": each} for each in BACKENDS[kind]}}
        given = {**task, "x": encode(task["images"][:count]), "dims": [count, *task["images"].shape[1:]]}
        given["y"] = task["y"][:count]
        del given["images"]
        for engine, more in engines.items():
            page.evaluate("([name, task]) => window.open_(name, task)", [engine, {**given, **more}])
        compare_answers(page, list(engines), name)
        times: dict[str, list[float]] = {engine: [] for engine in engines}
        if kind == "train":
            losses = {engine: page.evaluate("name => window.train(name, 1)", engine)["loss"] for engine in engines}
            # Both have made a step from the same weights: the losses before it are the same.
            np.testing.assert_allclose(list(losses.values()), losses["archipel"], rtol=1e-3, err_msg=name)
        runs = {engine: repetitions(page, kind, engine) for engine in engines}
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(times["archipel"]) < 3:
            for engine, repeated in runs.items():
                page.wait_for_timeout(100)
                times[engine].append(timed(page, kind, engine, repeated))
        title = f"{name}, step of {count}" if kind == "train" else f"{name}, predict {count}"
        ours = times.pop("archipel")
        rows += [
            Row(
                "browser_training", title, statistics.median(ours), statistics.median(values), engine,
                statistics.median(a / b for a, b in zip(ours, values)), "ms",
            )
            for engine, values in times.items()
        ]  # fmt: skip
    return rows


def compare_answers(page: Any, engines: list[str], name: str) -> None:
    """Raises AssertionError unless all tell the same probabilities: archipel gives logits, the others softmax."""
    found = {engine: np.array(page.evaluate("name => window.answers(name)", engine)) for engine in engines}
    logits = found.pop("archipel").reshape(-1, 10)
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected = exponents / exponents.sum(axis=1, keepdims=True)
    for engine, answers in found.items():
        np.testing.assert_allclose(answers.reshape(-1, 10), expected, atol=1e-4, err_msg=f"{name}, {engine}")


def timed(page: Any, kind: str, engine: str, repeated: int) -> float:
    """Milliseconds of one step or one prediction."""
    found = page.evaluate(f"([name, count]) => window.{kind}(name, count)", [engine, repeated])
    return float(found["ms"] if kind == "train" else found)


def repetitions(page: Any, kind: str, engine: str) -> int:
    """How many take about 0.3 seconds; calls them for the first time."""
    timed(page, kind, engine, 1)
    return max(1, round(300 / timed(page, kind, engine, 2)))


def make_task(name: str, folder: Path) -> dict[str, Any]:
    """What both sides are given: a bundle and the same weights by layer, pictures and labels."""
    import torch

    from archipel import models
    from archipel.bundle import generate_key
    from archipel.converter import Signing, Training, convert
    from archipel.training import losses, optimizers

    network = {"digits CNN": models.digits_cnn, "ResNet-8": models.resnet8}[name](0)
    shape = (1, 28, 28) if name == "digits CNN" else (3, 32, 32)
    rng = np.random.default_rng(0)
    key, file = generate_key(), f"{name.split()[0].lower()}.bundle"
    convert(
        network,
        folder / file,
        example=torch.zeros(2, *shape),
        training=Training(losses.cross_entropy(), optimizers.sgd(momentum=0.9)),
        signing=Signing(key),
    )
    return {
        "bundle": f"./{file}",
        "key": key.public_key().public_bytes_raw().hex(),
        "network": name,
        "weights": weights_by_layer(network),
        "images": rng.random((BATCH, *shape), np.float32),
        "y": rng.integers(0, 10, BATCH).tolist(),
        "lr": LEARNING_RATE,
    }


def weights_by_layer(network: Any) -> dict[str, list[dict[str, Any]]]:
    """Base64 of float32 in TensorFlow's layouts, in the order in which its layers have them."""
    import torch

    found = {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            arrays = [module.weight, module.bias, module.running_mean, module.running_var]
        elif isinstance(module, torch.nn.Conv2d | torch.nn.Linear):
            arrays = [module.weight, *([] if module.bias is None else [module.bias])]
        else:
            continue
        plain = [array.detach().numpy() for array in arrays]
        if name == "hidden":  # it follows Flatten, which is of channels first here and of channels last there
            plain[0] = plain[0].reshape(64, 16, 4, 4).transpose(0, 2, 3, 1).reshape(64, -1)
        turned = [np.ascontiguousarray(array.transpose(TRANSPOSED[array.ndim])) for array in plain]
        found[name.replace(".", "_")] = [{"data": encode(array), "shape": list(array.shape)} for array in turned]
    return found


def encode(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array, np.float32).tobytes()).decode()


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The folder at an address of loopback."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Files(http.server.SimpleHTTPRequestHandler):
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".wasm": "application/wasm"}

    def log_message(self, *given: Any) -> None:
        pass


def install(folder: Path) -> None:
    """TensorFlow.js and `archipel-web` from npm's registry and this checkout, and the page that Vite builds of them."""
    folder.mkdir(parents=True, exist_ok=True)
    run(sys.executable, str(ROOT / "scripts" / "npm_package.py"), str(folder), cwd=ROOT)
    (archive,) = folder.glob("archipel-web-*.tgz")
    needs = {"@tensorflow/tfjs": TENSORFLOW, "@tensorflow/tfjs-backend-wasm": TENSORFLOW}
    described = {"private": True, "type": "module", "dependencies": {**needs, "archipel-web": f"file:{archive.name}"}}
    (folder / "package.json").write_text(json.dumps(described))
    # Of the archive, which has the same version after a change, npm would keep the old one.
    shutil.rmtree(folder / "node_modules" / "archipel-web", ignore_errors=True)
    (folder / "package-lock.json").unlink(missing_ok=True)
    run("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", cwd=folder)
    for file in PAGE.iterdir():
        shutil.copy(file, folder)
    vite = ROOT / "web" / "node_modules" / "vite" / "bin" / "vite.js"
    (folder / "vite.config.js").write_text(
        'export default { base: "./", build: { outDir: "site", rollupOptions: { input: "page.html" } } };\n'
    )
    run("node", str(vite), "build", "--logLevel", "error", cwd=folder)
    wasm = folder / "node_modules" / "@tensorflow" / "tfjs-backend-wasm" / "dist"
    (folder / "site" / "wasm").mkdir(exist_ok=True)
    for file in wasm.glob("*.wasm"):
        shutil.copy(file, folder / "site" / "wasm")


def run(*command: str, cwd: Path) -> None:
    subprocess.run(command, cwd=cwd, check=True)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of TensorFlow.js and the page")
    parser.add_argument("--install-peers", action="store_true", help="install them, and end")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
