"""A server in processes of its own on loopback, its operator, and enrolled devices for the agent's benchmark."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from onnx import parser
from server_load import SERVE

from archipel import bundle as b
from archipel.bundle import roles
from archipel.client import Agent, AgentConfig, Event
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.sealed import public_bytes
from archipel.server import init_data_folder, load_settings

POPULATION = "devices"
PRIVACY = b.PrivacyPolicy(
    modes=("secure", "plain"), min_cohort=2, threshold=0.51, max_clip=10.0, max_bits=24, colluders=0.0
)
_PHASES = ("assigning", "advertising", "sharing", "complaining", "masking", "confirming", "unmasking", "updating")

_TRAIN = """<ir_version: 10, opset_import: ["": 21]>
train (float[n] x, float[%d] w, float lr) => (float[%d] w_new, float loss) {
    loss = ReduceMean <keepdims = 0> (x)
    step = Mul(loss, lr)
    w_new = Sub(w, step)
}"""
_FINISH = """<ir_version: 10, opset_import: ["": 21]>
finish (float[%d] w, float[%d] w_start) => (float[%d] w_update) {
    change = Sub(w, w_start)
    low = Constant <value_float = -1.0> ()
    high = Constant <value_float = 1.0> ()
    w_update = Clip(change, low, high)
}"""


class Federation:
    """A server's data folder and keys; `serving` runs the server. Devices are told to come again after `retry_after`
    seconds, or less; `settings` are further ones of the server."""

    def __init__(self, folder: Path, retry_after: float, publisher: Any = None, **settings: float) -> None:
        self.folder = folder
        self.publisher = publisher or b.generate_key()
        self._enrolment = b.generate_key()
        keys = {"enrolment_key": public_bytes(self._enrolment), "publisher_keys": [public_bytes(self.publisher)]}
        self._operator_token = init_data_folder(folder / "server", **keys)
        window = max(10.0, 3 * retry_after)
        self._settings = load_settings(
            folder / "server", environment={}, retry_after=retry_after, check_in_window=window, **settings
        )
        self.port = 0
        self.ids: dict[Path, str] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[OperatorClient]:
        named = {name: value for name, value in self._settings.environment().items() if not name.endswith("_PORT")}
        command = [sys.executable, "-c", SERVE, str(self.folder / "server")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | named)
        try:
            assert process.stdout is not None
            self.port = int(process.stdout.readline().rsplit(":", 1)[1])
            with OperatorClient(self.url, self._operator_token) as operator:
                yield operator
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)

    def enrolled(self, name: str, population: str = POPULATION) -> Path:
        """The folder of a device that has just joined."""
        config = AgentConfig(folder=self.folder / name, server=self.url)
        with Agent(config, examples=dict) as agent:
            self.ids[config.folder] = agent.enrol(self._token(population))
        return config.folder

    def _token(self, population: str) -> EnrolmentToken:
        seed, until = secrets.token_bytes(32), int(time.time()) + 600
        return EnrolmentToken(
            server=self.url,
            server_key=self._settings.public_key,
            enrolment_key=public_bytes(self._enrolment),
            publisher_keys=[public_bytes(self.publisher)],
            population=population,
            seed=seed,
            certificate=mint_token(self._enrolment, population=population, not_after=until, seed=seed),
        )


def rounds(
    operator: OperatorClient, bundle: Path, cohort: int, count: int, privacy: str, population: str = POPULATION
) -> Callable[[], None]:
    """Has every device of `cohort` train `bundle` for `count` rounds; the call that is returned waits for their end."""
    task = operator.tasks.create(
        TaskRequest(
            name="rounds", population=population, bundle=operator.bundles.upload(bundle).digest, rounds=count,
            min_cohort=cohort, cohort=cohort, privacy=privacy, deadlines=dict.fromkeys(_PHASES, 120.0),
        )  # type: ignore[arg-type]
    )  # fmt: skip

    def wait() -> None:
        ended = operator.tasks.wait(task.task_id, timeout=600, poll=0.1)
        if ended.state != "completed":
            raise RuntimeError(f"the task is {ended.state}: {ended.reason}")

    return wait


@contextmanager
def agents(
    folders: Mapping[Path, str], data: Mapping[str, np.ndarray], on_event: Callable[[Event], None] | None = None
) -> Iterator[None]:
    """Agents in threads of this process, one for each folder, at these servers; all have the same data."""
    stop = threading.Event()

    def work(folder: Path, server: str) -> None:
        config = AgentConfig(folder=folder, server=server, allow_plain=True, isolated=False)
        with Agent(config, examples=lambda: data, on_event=on_event) as agent:
            agent.run_forever(stop)

    threads = [threading.Thread(target=work, args=each) for each in folders.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextmanager
def device(python: Path, environment: Mapping[str, str], folder: Path, server: str, data: str = "") -> Iterator[int]:
    """`archipel device run` in that folder; the id of its process."""
    settings = folder.with_suffix(".toml")
    examples = f"file = {json.dumps(data)}" if data else "store = true"
    settings.write_text(
        f"folder = {json.dumps(str(folder))}\nserver = {json.dumps(server)}\nallow_plain = true\n"
        f"[conditions]\nmin_free_disk = 1_000_000\n[examples]\n{examples}\n"
    )
    command = [str(python.parent / "archipel"), "device", "run", str(settings)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def flat_bundle(folder: Path, entries: int, key: Any, privacy: b.PrivacyPolicy = PRIVACY) -> Path:
    """A bundle of one vector of so many float32, of which each round's update is as large; trains in no time."""
    f32: dict[str, Any] = {"dtype": "float32"}
    w: dict[str, Any] = {"tensor": "w", "shape": (entries,), **f32}
    update: dict[str, Any] = {"kind": "delta", "weighting": "uniform", "range": 4.0, "bits": 16, "clip": 2.0}
    rate = roles.Hyperparameter(name="lr", shape=(), default=0.1, minimum=0.0, maximum=1.0, **f32)
    programs = {
        "train": b.Program(
            kind="train",
            file="train.onnx",
            inputs=(roles.Example(name="x", shape=("n",), **f32), roles.Parameter(name="w", **w), rate),
            outputs=(
                roles.Parameter(name="w_new", **w),
                roles.Metric(name="loss", shape=(), reduction="mean", **f32),
            ),
        ),
        "finish": b.Program(
            kind="finish",
            file="finish.onnx",
            inputs=(roles.Parameter(name="w", **w), roles.Start(name="w_start", **w)),
            outputs=(roles.Update(name="w_update", **w, **update),),
        ),
    }
    graphs = {"train.onnx": _TRAIN % (entries, entries), "finish.onnx": _FINISH % (entries, entries, entries)}
    tensors = {"w": np.zeros(entries, np.float32)}
    b.write_bundle(
        folder,
        name=folder.name,
        programs=programs,
        graphs={name: parser.parse_model(text).SerializeToString() for name, text in graphs.items()},
        weights=b.write_weights(tensors),
        parameters=b.parameter_specs(tensors, ["w"]),
        limits=b.Limits(peak_bytes=1 << 26, flops_per_example=1, upload_bytes=4 * entries),
        privacy=privacy,
        key=key,
        schedule=(b.Phase(program="train", epochs=1, batch_size=8),),
        strategy="fedavg",
    )
    b.pack(folder, folder.with_suffix(".bundle"))
    return folder.with_suffix(".bundle")
