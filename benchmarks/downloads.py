"""Bytes over the wire for what is new, with the version before in the device's cache: by pieces, and as whole files.

    python benchmarks/downloads.py [--quick] [--json]

A real server on loopback; bodies and headers of both directions are counted. Bundles as `convert` makes them, and their
parameters as the weights of a round, whose parameters differ: in the last layer, in the adapters, or everywhere.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from agent_federation import POPULATION, Federation
from measure import Report, Row, arguments

from archipel import bundle as b
from archipel.client import Agent, AgentConfig
from archipel.client.downloads.cache import Cache
from archipel.client.downloads.pieces import PieceDownload
from archipel.converter import Signing, Training, convert
from archipel.models import mobilenet_v2, resnet8
from archipel.operator import OperatorClient, TaskRequest
from archipel.training import losses, optimizers

LIMIT = 1 << 30
MODELS = {"ResNet-8": resnet8, "MobileNetV2": mobilenet_v2}
CHANGES = {"last layer": "fedavg", "adapters": "lora", "everything": "fedavg"}
"""What changes, and the strategy of its bundles."""


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json, ("numpy", "onnxruntime", "torch", "flask"))
    with tempfile.TemporaryDirectory(prefix="archipel-downloads-") as name:
        for model in list(MODELS)[: 1 if options.quick else 2]:
            for changed in CHANGES:
                report.add(measure(Path(name) / f"{model} {changed}", model, changed))


def measure(folder: Path, model: str, changed: str) -> Iterator[Row]:
    federation = Federation(folder, 5.0)
    for number in range(2):
        made(federation, folder / f"{number}", model, changed, number)
    with federation.serving() as operator:
        device = federation.enrolled("device")
        bundles = [operator.bundles.upload(folder / f"{number}.bundle").digest for number in range(2)]
        weights = [first_weights(operator, digest) for digest in bundles]
        with Agent(AgentConfig(folder=device, server=federation.url), examples=dict) as agent:
            agent.run_once()
            for what, digests in (("bundle", bundles), ("weights", weights)):
                ours, peer = (
                    cost(agent, folder / f"{what} {pieces}", what, digests, pieces=pieces) for pieces in (True, False)
                )
                case = f"{model}, {what}, {changed}"
                yield Row("downloads", case, ours / 1e3, peer / 1e3, "the whole file", ours / peer, "kB")


def made(federation: Federation, folder: Path, model: str, changed: str, number: int) -> None:
    network = MODELS[model](0)
    last = list(network.parameters())[-2:]
    with torch.no_grad():
        for tensor in {"last layer": last, "adapters": [], "everything": network.parameters()}[changed]:
            tensor.mul_(1 + number / 100)
    lora = {"rank": 4, "seed": number} if changed == "adapters" else {}
    convert(
        network, folder, example=torch.zeros(2, 3, 32, 32),
        training=Training(losses.cross_entropy(), optimizers.sgd(lr=0.1), strategy=CHANGES[changed],
                          strategy_options=lora),
        signing=Signing(federation.publisher),
    )  # fmt: skip
    b.pack(folder, folder.with_suffix(".bundle"))


def first_weights(operator: OperatorClient, bundle: str) -> str:
    """The parameters of a bundle, stored as the weights of a task's first round; their digest."""
    task = operator.tasks.create(
        TaskRequest(name="weights", population=POPULATION, bundle=bundle, rounds=1, min_cohort=15, cohort=15)
    )
    while (model := operator.tasks.get(task.task_id).model) is None:
        time.sleep(0.05)
    # It lives on, for devices fetch what live tasks name; it waits for devices that never come.
    return model


def cost(agent: Agent, folder: Path, what: str, digests: Sequence[str], *, pieces: bool) -> float:
    """Bytes for the second file, where the first one is in the cache."""
    transport, session, record = agent._connect()
    cache = Cache(folder, LIMIT)
    for digest in digests:
        transport.traffic.take()
        download = PieceDownload(session, cache.index) if pieces else session.download
        if what == "bundle":
            cache.bundle(digest, record.publisher_keys, download, LIMIT)
        else:
            cache.weights(digest, download, LIMIT)
    traffic = transport.traffic.take()
    return float(traffic.received + traffic.sent + traffic.headers_received + traffic.headers_sent)


if __name__ == "__main__":
    main()
