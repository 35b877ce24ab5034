"""A root server and edge servers, each as its supervisor runs it, and agents below them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from archipel import bundle as b
from archipel.client import Agent, AgentConfig, Event
from archipel.client.rounds import participation
from archipel.client.rounds.work import Contribution, Prepared, contribute
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.messages import Root, RoundPlan
from archipel.protocol.operator.tasks import RoundInfo, TaskInfo
from archipel.protocol.sealed import encode, public_bytes
from archipel.server import init_data_folder, load_settings
from tests.support.database import migrated_database
from tests.support.linear_bundle import local_data, make_bundle
from tests.support.serving import Server

SITES = b.Aggregators(min_site_cohort=2, max_site_cohort=8)
PATIENT = {"assigning": 20.0, "advertising": 40.0, "sharing": 10.0, "complaining": 10.0, "masking": 10.0,
           "confirming": 10.0, "unmasking": 10.0}  # fmt: skip
QUICK: dict[str, Any] = {
    "backoff": 0.02, "attempts": 3, "patience": 20.0, "pause_seconds": 0.05, "max_wait": 0.2, "resume_within": 0.2,
    "max_offline_wait": 1.0, "isolated": False,
}  # fmt: skip


@dataclass
class Node:
    """One server of a tree. `members` is the population of those that enrol here."""

    name: str
    folder: Path
    enrolment: Ed25519PrivateKey
    publisher: Ed25519PrivateKey
    members: str
    operator_token: str
    root: Root | None = None
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        self.server = Server(self.folder)

    @property
    def public_key(self) -> bytes:
        return load_settings(self.folder, environment={}).public_key

    @property
    def operator(self) -> OperatorClient:
        return OperatorClient(self.server.url, self.operator_token, allow_http=True)

    def start(self, port: int = 0) -> None:
        self.server.start(port, poll_seconds="0.02", smallest_answer="1")

    def token(self, kind: str = "device", **changes: Any) -> EnrolmentToken:
        seed = secrets.token_bytes(32)
        certificate = mint_token(
            self.enrolment,
            population=self.members,
            not_after=int(time.time()) + 600,
            seed=seed,
            kind=kind,  # type: ignore[arg-type]
        )
        values: dict[str, Any] = {
            "server": self.server.url,
            "server_key": self.public_key,
            "enrolment_key": public_bytes(self.enrolment),
            "publisher_keys": [public_bytes(self.publisher)],
            "population": self.members,
            "seed": seed,
            "certificate": certificate,
            "root": self.root,
        }
        return EnrolmentToken(**{**values, **changes})

    def as_root(self) -> Root:
        """What those below this server's members pin."""
        if self.root is not None:
            return self.root
        return Root(server_key=self.public_key, enrolment_key=public_bytes(self.enrolment), population=self.members)


def make_node(
    folder: Path,
    name: str,
    publisher: Ed25519PrivateKey,
    members: str,
    *,
    below: Node | None = None,
    cohort: int = 4,
    extra: str = "",
) -> Node:
    """A data folder; with `below` that of an edge server, whose rounds for that one take `cohort` members."""
    enrolment, place = b.generate_key(), folder / name
    token = init_data_folder(
        place, enrolment_key=public_bytes(enrolment), publisher_keys=[public_bytes(publisher)]
    )  # fmt: skip
    (place / "archipel.db").write_bytes(migrated_database())
    node = Node(name, place, enrolment, publisher, members, token)
    if below is not None:
        node.root = below.as_root()
        (place / "upstream.token").write_bytes(encode(below.token("aggregator")))
        with (place / "server.toml").open("a") as file:
            file.write(f'\n[upstream]\npopulation = "{members}"\ncohort = {cohort}\n{extra}')
    return node


@dataclass
class Tree:
    """A root, and what is below it, started and ended together."""

    folder: Path
    publisher: Ed25519PrivateKey
    bundle_file: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    agents: list[Agent] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def root(self) -> Node:
        return self.nodes["root"]

    def add(self, name: str, members: str, below: str | None = None, **more: Any) -> Node:
        above = None if below is None else self.nodes[below]
        node = self.nodes[name] = make_node(self.folder, name, self.publisher, members, below=above, **more)
        node.start()
        return node

    def agent(self, node: str, number: int, **more: Any) -> Agent:
        """A device with the examples of that number, enrolled at the node."""
        config = AgentConfig(folder=self.folder / f"device-{number}", **{**QUICK, **more})
        agent = Agent(config, examples=lambda: local_data(number), on_event=self.events.append)
        agent.enrol(self.nodes[node].token())
        self.agents.append(agent)
        return agent

    def task(self, **changes: Any) -> TaskInfo:
        operator = self.root.operator
        digest = operator.bundles.upload(self.bundle_file).digest
        values: dict[str, Any] = {
            "name": "linear", "population": self.root.members, "bundle": digest, "rounds": 1, "min_cohort": 2,
            "cohort": 2, "levels": 1, "deadlines": PATIENT, **changes,
        }  # fmt: skip
        return operator.tasks.create(TaskRequest(**values))

    def rounds(self, task: TaskInfo) -> list[RoundInfo]:
        return list(self.root.operator.tasks.rounds(task.task_id))

    def state(self, task: TaskInfo) -> TaskInfo:
        return self.root.operator.tasks.get(task.task_id)

    def weights(self, task: TaskInfo) -> Mapping[str, np.ndarray]:
        model = self.state(task).model
        assert model is not None
        return self.root.operator.weights.read(model)

    def logs(self) -> str:
        return "\n".join(
            f"--- {name}\n{(node.folder / 'server.log').read_text()[-3000:]}" for name, node in self.nodes.items()
        )

    def run(self, until: Callable[[], bool], timeout: float = 60.0) -> None:
        """`run_forever` in a thread for each agent, until the condition holds."""
        stop, errors = threading.Event(), list[BaseException]()

        def work(agent: Agent) -> None:
            try:
                agent.run_forever(stop)
            except BaseException as error:  # noqa: BLE001 - reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(agent,)) for agent in self.agents]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        try:
            while not until() and not errors:
                told = [(event.name, dict(event.detail)) for event in self.events][-20:]
                assert time.monotonic() < deadline, f"{told}\n{self.logs()}"
                time.sleep(0.05)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for node in self.nodes.values():
            if node.server.alive:
                node.server.stop()


@contextmanager
def open_tree(folder: Path, **policy: Any) -> Iterator[Tree]:
    """Without any server yet. `policy`: fields of the bundle's privacy policy."""
    publisher = b.generate_key()
    given = {"min_cohort": 2, "aggregators": SITES, **policy}
    bundle_file = make_bundle(folder / "linear", publisher, **given)
    tree = Tree(folder, publisher, bundle_file)
    with ExitStack() as stack:
        stack.callback(tree.close)
        stack.enter_context(same_draws())
        yield tree


@contextmanager
def same_draws() -> Iterator[None]:
    """Devices draw what follows from their number and the round's, and not from their secrets: so that two federations
    of the same devices train in the same way."""

    def contribute_from(prepared: Prepared, plan: RoundPlan, **given: Any) -> Contribution:
        number = int(given["config"].folder.name.rpartition("-")[2])
        return contribute(prepared, plan, **{**given, "seed": 1000 * number + plan.number})

    with patch.object(participation, "contribute", contribute_from):
        yield
