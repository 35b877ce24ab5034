"""Bytes over the wire for a new version, with the one before in the device's cache: by pieces, against the whole file.

    python benchmarks/downloads.py [--quick] [--json]

A real server on loopback; bodies and headers of both directions are counted. Two bundles as `convert` makes them, whose
parameters differ: in the last layer, or everywhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from agent_federation import Federation
from measure import Report, Row, arguments

from archipel import bundle as b
from archipel.bundle import Bundle
from archipel.client import Agent, AgentConfig
from archipel.client.cache import Cache
from archipel.client.pieces import PieceDownload
from archipel.converter import convert
from archipel.models import mobilenet_v2, resnet8
from archipel.protocol.sealed import public_bytes
from archipel.training import losses, optimizers

LIMIT = 1 << 30
MODELS = {"ResNet-8": resnet8, "MobileNetV2": mobilenet_v2}


def main() -> None:
    options = arguments(__doc__).parse_args()
    report = Report(options.json)
    with tempfile.TemporaryDirectory(prefix="archipel-downloads-") as name:
        for model in list(MODELS)[: 1 if options.quick else 2]:
            report.add(measure(Path(name) / model, model))


def measure(folder: Path, model: str) -> list[Row]:
    federation = Federation(folder, 5.0)
    first = made(federation, folder / "first", model, "nothing")
    size = sum(array.nbytes for array in first.parameters().values())
    rows = []
    with federation.serving() as operator:
        device = federation.enrolled("device")
        operator.upload_bundle(folder / "first.bundle")
        with Agent(AgentConfig(folder=device, server=federation.url), examples=dict) as agent:
            agent.run_once()
            for changed in ("the head", "everything"):
                second = made(federation, folder / changed, model, changed)
                operator.upload_bundle(folder / f"{changed}.bundle")
                ours, peer = (
                    cost(agent, folder / f"cache-{changed}-{pieces}", first, second, pieces=pieces)
                    for pieces in (True, False)
                )
                case = f"{model}, {size / 1e6:.1f} MB, {changed}"
                rows.append(Row("downloads", case, ours / 1e3, peer / 1e3, "the whole bundle", ours / peer, "kB"))
    return rows


def made(federation: Federation, folder: Path, model: str, changed: str) -> Bundle:
    network = MODELS[model](0)
    last = list(network.parameters())[-2:]
    with torch.no_grad():
        for tensor in {"nothing": [], "the head": last, "everything": network.parameters()}[changed]:
            tensor.mul_(1.01)
    convert(
        network, folder, example=torch.zeros(2, 3, 32, 32), loss=losses.cross_entropy(),
        optimizer=optimizers.sgd(lr=0.1), sign_key=federation.publisher,
    )  # fmt: skip
    b.pack(folder, folder.with_suffix(".bundle"))
    return b.open_bundle(folder, [public_bytes(federation.publisher)])


def cost(agent: Agent, folder: Path, first: Bundle, second: Bundle, *, pieces: bool) -> float:
    """Bytes for the second bundle, where the first one is in the cache."""
    transport, session, record = agent._connected()
    cache = Cache(folder, LIMIT)
    cache.bundle(first.digest, record.publisher_keys, session.download, LIMIT)
    transport.traffic.take()
    download = PieceDownload(session, cache.index) if pieces else session.download
    found = cache.bundle(second.digest, record.publisher_keys, download, LIMIT)
    assert found.digest == second.digest
    traffic = transport.traffic.take()
    return float(traffic.received + traffic.sent + traffic.headers_received + traffic.headers_sent)


if __name__ == "__main__":
    main()
