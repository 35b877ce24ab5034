"""Flower's SecAgg+ in one process: `python run_flower.py '{"do": "round", "clients": 100, ...}'`. Runs where flwr is.

`round` runs its real workflow, `SecAggPlusWorkflow`, over its real `secaggplus_mod` for each client; the server's time
is that of the workflow less what the clients took. `client` runs one real client: neighbours advertise with the mod,
and what they send it is encrypted with their keys, but of random shares. `parts` times what the workflow's last two
stages do for one vector, one secret and one mask with its own functions, for rounds in which it would do so for hours.
Nothing is serialized for the network in any of them.

Prints one JSON object with seconds by the clock and of the processor.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Parameters,
    Status,
    bytes_to_ndarray,
    ndarray_to_bytes,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import encrypt, generate_shared_key
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition, parameters_subtraction
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen, share_keys_plaintext_concat
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, parameters_to_arrayrecord
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.supercore.primitives.asymmetric import (
    bytes_to_private_key,
    bytes_to_public_key,
    generate_key_pairs,
    private_key_to_bytes,
    public_key_to_bytes,
)
from flwr.supercore.task_identity import TaskIdentity

MOD = sys.modules["flwr.client.mod.secure_aggregation.secaggplus_mod"]
VALUES = 2**16
"""Steps of a quantized value; the modulus is Flower's default, 2^32."""
CANCELS = b"cancels"


class Client:
    """One client with the real mod, whose training returns `update`."""

    def __init__(self, node: int, update: Callable[[int], np.ndarray]) -> None:
        self.node, self._update = node, update
        self._context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        self.seconds = self.processor = 0.0

    def handle(self, message: Message) -> Message:
        began = time.perf_counter(), time.process_time()
        reply = secaggplus_mod(message, self._context, self._train)
        self.seconds += time.perf_counter() - began[0]
        self.processor += time.process_time() - began[1]
        return reply

    @property
    def state(self) -> ConfigRecord:
        return self._context.state.config_records["secaggplus_state"]

    def _train(self, message: Message, _: Context) -> Message:
        began = time.perf_counter(), time.process_time()
        found = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([self._update(self.node)]), 1, {})
        reply = Message(fitres_to_recorddict(found, False), reply_to=message)
        self.seconds -= time.perf_counter() - began[0]
        self.processor -= time.process_time() - began[1]
        return reply


class Grid:
    """Hands messages to clients in this process; `leaving` fail when they are asked for their vectors."""

    def __init__(self, clients: dict[int, Client], leaving: set[int]) -> None:
        self._clients, self._leaving = clients, leaving
        self._keys: set[bytes] = set()
        self.away = [0.0, 0.0]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        began = time.perf_counter(), time.process_time()
        replies = [self._deliver(message) for message in messages]
        self.away[0] += time.perf_counter() - began[0]
        self.away[1] += time.process_time() - began[1]
        return replies

    def _deliver(self, message: Message) -> Message:
        node, stage = message.metadata.dst_node_id, message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
        if node in self._leaving and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK):
            return Message(Error(code=1, reason="left"), reply_to=message)
        # The mod takes the stage out of its message, and the setup's content is the same for all.
        content = RecordDict(dict(message.content))
        content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(
            dict(message.content.config_records[RECORD_KEY_CONFIGS])
        )
        told = Message(content, metadata=message.metadata)
        with_masks = stage == Stage.COLLECT_MASKED_VECTORS
        if stage == Stage.SHARE_KEYS:
            self._note_keys(node)
        MOD.generate_shared_key = self._key_unless_it_cancels if with_masks else generate_shared_key
        MOD.pseudo_rand_gen = _mask_unless_it_cancels
        return self._clients[node].handle(told)

    def _note_keys(self, node: int) -> None:
        if node in self._leaving:
            self._keys.add(bytes(self._clients[node].state["pk1"]))

    def _key_unless_it_cancels(self, private: Any, public: Any) -> bytes:
        """A mask with a client that stays cancels, so both leave it out: the server cannot tell, and it takes long."""
        return generate_shared_key(private, public) if public_key_to_bytes(public) in self._keys else CANCELS


def _mask_unless_it_cancels(seed: bytes, span: int, shapes: list[Any]) -> list[Any]:
    return [np.int64(0)] * len(shapes) if seed == CANCELS else pseudo_rand_gen(seed, span, shapes)


class Proxy:
    def __init__(self, node: int) -> None:
        self.node_id, self.cid = node, str(node)


class Strategy(FedAvg):
    """All clients train; of the round only the aggregate is kept, which the workflow gives every result."""

    def __init__(self, nodes: Iterable[int]) -> None:
        super().__init__()
        self._nodes = nodes
        self.mean: np.ndarray | None = None

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> Any:
        return [(Proxy(node), FitIns(parameters, {})) for node in self._nodes]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def run_round(clients: int, entries: int, shares: int, threshold: int) -> dict[str, float]:
    """A round in which a tenth leaves before sending vectors. Raises AssertionError for a wrong mean."""
    nodes = range(1, clients + 1)
    leaving = set(nodes[::10])
    plain = np.zeros(entries)

    def update(node: int) -> np.ndarray:
        drawn = np.random.default_rng(node).uniform(-1, 1, entries).astype(np.float32)
        plain[:] += drawn
        return drawn

    grid, strategy = Grid({node: Client(node, update) for node in nodes}, leaving), Strategy(nodes)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(
        ndarrays_to_parameters([np.zeros(1, np.float32)]), False
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=1), strategy, SimpleClientManager())
    workflow = SecAggPlusWorkflow(shares, threshold, max_weight=1.0, clipping_range=1.0, quantization_range=VALUES)
    began = time.perf_counter(), time.process_time()
    workflow(grid, legacy)
    seconds, processor = time.perf_counter() - began[0], time.process_time() - began[1]
    assert strategy.mean is not None, "the workflow has halted"
    apart = np.abs(strategy.mean - plain / (clients - len(leaving))).max()
    assert apart < 4 / VALUES, f"the mean is {apart} off"
    return {"server": seconds - grid.away[0], "server_processor": processor - grid.away[1]}


def run_client(entries: int, shares: int, threshold: int) -> dict[str, float]:
    """What one client with `shares` - 1 neighbours takes, of which a tenth leaves."""
    nodes = range(1, shares + 1)
    clients = {node: Client(node, lambda _: np.zeros(entries, np.float32)) for node in nodes}
    setup = {
        Key.STAGE: Stage.SETUP, Key.SAMPLE_NUMBER: shares, Key.SHARE_NUMBER: shares, Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: 1.0, Key.TARGET_RANGE: VALUES, Key.MOD_RANGE: 2**32, Key.MAX_WEIGHT: 1.0,
    }  # fmt: skip
    public = {}
    for node, client in clients.items():
        reply = client.handle(_message(node, setup)).content.config_records[RECORD_KEY_CONFIGS]
        public[node] = [reply[Key.PUBLIC_KEY_1], reply[Key.PUBLIC_KEY_2]]
    first, others = clients[1], nodes[1:]
    first.handle(_message(1, {Key.STAGE: Stage.SHARE_KEYS} | {str(node): keys for node, keys in public.items()}))
    sent = []
    for node in others:
        key = generate_shared_key(bytes_to_private_key(clients[node].state["sk2"]), bytes_to_public_key(public[1][1]))
        seed, private = (os.urandom(4 + size) for size in _share_bytes())
        sent.append(encrypt(key, share_keys_plaintext_concat(node, 1, seed, private)))
    first.handle(
        _message(1, {Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.CIPHERTEXT_LIST: sent, Key.SOURCE_LIST: [*others]})
    )
    gone = [*nodes[1::10]]
    there = [node for node in nodes if node not in gone]
    first.handle(_message(1, {Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: there, Key.DEAD_NODE_ID_LIST: gone}))
    return {"client": first.seconds, "client_processor": first.processor}


def run_parts(entries: int, shares: int, threshold: int, shown: int) -> dict[str, dict[str, float]]:
    """Seconds of one `seed`, one `key`, one `mask` (with its key agreement: one `pair`), and one `vector` added."""
    private, public = generate_key_pairs()
    private_bytes, public_bytes = private_key_to_bytes(private), public_key_to_bytes(public)
    of_seed = create_shares(os.urandom(32), threshold, shares)[:shown]
    of_key = create_shares(private_bytes, threshold, shares)[:shown]
    total = pseudo_rand_gen(os.urandom(32), 2**32, [(1,), (entries,)])
    packed = [ndarray_to_bytes(part) for part in total]

    def mask(seed: bytes) -> None:
        parameters_subtraction(total, pseudo_rand_gen(seed, 2**32, [part.shape for part in total]))

    def pair() -> None:
        mask(generate_shared_key(bytes_to_private_key(private_bytes), bytes_to_public_key(public_bytes)))

    def add() -> None:
        parameters_addition(total, [bytes_to_ndarray(part) for part in packed])

    seed = os.urandom(32)
    parts = {
        "seed": lambda: combine_shares(of_seed), "key": lambda: combine_shares(of_key), "mask": lambda: mask(seed),
        "pair": pair, "vector": add,
    }  # fmt: skip
    return {name: _least(part) for name, part in parts.items()}


def _least(part: Callable[[], object]) -> dict[str, float]:
    """The fastest of three: all of it is multiplied, and a disturbance would be, too."""
    times = []
    for _ in range(3):
        began = time.perf_counter(), time.process_time()
        part()
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    return {"seconds": min(t for t, _ in times), "processor": min(t for _, t in times)}


def _share_bytes() -> tuple[int, int]:
    """Of a seed and of a private key: padded to a multiple of 16, as `create_shares` does."""
    private, _ = generate_key_pairs()
    return 48, (len(private_key_to_bytes(private)) // 16 + 1) * 16


def _message(node: int, told: dict[str, Any]) -> Message:
    return Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(told)}), node, "train")


def main() -> None:
    given = json.loads(sys.argv[1])
    # Without it no message can be made; in a deployment the SuperLink sets it.
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    run = {"round": run_round, "client": run_client, "parts": run_parts}[given.pop("do")]
    print(json.dumps(run(**given)))


if __name__ == "__main__":
    main()
