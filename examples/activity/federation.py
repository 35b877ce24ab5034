"""The server and everybody's phone: enrolment, the training task, evaluations; all of them secure rounds."""

from __future__ import annotations

import math
import os
import queue
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from cloud import THRESHOLD
from people import Groups
from phones import MODEL, Measured, Personal, PhoneConfig, PhonesConfig

from archipel.bundle import generate_key
from archipel.cli.start.local.events import HostEvent
from archipel.cli.start.local.processes import Processes
from archipel.errors import CommandError
from archipel.operator import OperatorClient, TaskRequest
from archipel.protocol.identity import EnrolmentToken, mint_token
from archipel.protocol.operator.registry import VersionRequest
from archipel.protocol.operator.tasks import RoundInfo
from archipel.protocol.sealed import encode
from archipel.server import init_data_folder, load_settings

POPULATION = "walkers"
HOSTS = 2
LEARNING_RATE = 0.05
PHONES = str(Path(__file__).with_name("phones.py"))


def cohort_of(count: int) -> int:
    """So many of `count` phones are taken into a round: about three in four."""
    return max(3, math.ceil(0.75 * count))


def least_of(cohort: int) -> int:
    """So many must stay to the end."""
    return max(3, math.ceil(0.75 * cohort))


class Phones:
    """The processes of everybody's phone, and what these told."""

    def __init__(self, folder: Path, data: Path, groups: Groups) -> None:
        self.folder = folder
        self.data = data
        self.configs = [
            PhoneConfig(
                f"person-{person:02}",
                person,
                str(folder / "phones" / f"person-{person:02}"),
                str(folder / "tokens" / f"person-{person:02}.token"),
                person in groups.contributors,
            )
            for person in groups.everybody
        ]
        self.ids: dict[str, int] = {}  # device id: person
        self.sent: dict[tuple[int, str], int] = {}  # person, round: bytes of bodies
        self.offered: dict[int, dict[int, str]] = {}  # version, person: "adopted" or "kept" (the one before)
        self.measured: dict[int, Measured] = {}
        self._persons = {config.name: config.person for config in self.configs}

    def start(self, processes: Processes, personal: Personal | None = None) -> None:
        configs = [
            PhonesConfig(os.getpid(), str(self.data.absolute()), self.configs[index::HOSTS], personal)
            for index in range(HOSTS)
        ]
        processes.start_hosts(configs, [sys.executable, PHONES])

    def listen(self, processes: Processes, timeout: float) -> None:
        """Take in what was told, waiting up to `timeout` seconds for the first. Raises CommandError if one failed."""
        processes.check()
        try:
            self._take(processes.events.get(timeout=timeout))
            while True:
                self._take(processes.events.get_nowait())
        except queue.Empty:
            return

    def _take(self, event: HostEvent) -> None:
        if event.event in ("failed", "refused"):
            raise CommandError(f"{event.device}: {event.text}")
        person = self._persons[event.device]
        if event.event == "measured":
            self.measured[person] = msgspec.json.decode(event.text, type=Measured)
            return
        if event.event in ("adopted", "kept"):
            self.offered.setdefault(int(event.text), {})[person] = event.event
        if event.device_id:
            self.ids[event.device_id] = person
        if event.round_id:
            self.sent[person, event.round_id] = max(event.sent, self.sent.get((person, event.round_id), 0))


class Federation:
    """A server in `folder`, with a population that nobody has joined yet."""

    def __init__(self, folder: Path, processes: Processes, publisher_key: bytes) -> None:
        self._processes = processes
        self._enrolment = generate_key()
        self._publisher_key = publisher_key
        self.data_folder = folder / "server"
        public = self._enrolment.public_key().public_bytes_raw()
        token = init_data_folder(self.data_folder, enrolment_key=public, publisher_keys=[publisher_key])
        self._server_key = load_settings(self.data_folder).public_key
        settings = self.data_folder / "server.toml"
        # Of these people we want to know who took part; of others a server does not tell.
        more = "retry_after = 0.25\ncheck_in_window = 5.0\nsmallest_answer = 1\n"
        settings.write_text(settings.read_text() + more)
        self.address = processes.start_server(self.data_folder)
        self.operator = OperatorClient(self.address, token)

    def enrol(self, phones: Phones, seconds: float = 120.0) -> None:
        """Give every phone its one-time token, start them, and wait until all have joined."""
        for config in phones.configs:
            path = Path(config.token)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(self._mint())
        phones.start(self._processes)
        deadline = time.monotonic() + seconds
        while len(phones.ids) < len(phones.configs):
            phones.listen(self._processes, 0.2)
            if time.monotonic() > deadline:
                raise CommandError(f"{len(phones.configs) - len(phones.ids)} phones did not enrol in {seconds:.0f} s")

    def train(
        self, phones: Phones, bundle: str, count: int, rounds: int, on_round: Callable[[RoundInfo], None]
    ) -> RoundInfo:
        """`rounds` secure rounds on the phones of the `count` contributors. Returns the last."""
        cohort = cohort_of(count)
        request = TaskRequest(
            name="learn",
            population=POPULATION,
            bundle=bundle,
            rounds=rounds,
            min_cohort=least_of(cohort),
            cohort=cohort,
            threshold=math.ceil(THRESHOLD * cohort),
            eligibility="contributes",
            hyperparameters={"lr": LEARNING_RATE},
        )
        return self._watch(phones, request, on_round)[-1]

    def promote(self, phones: Phones, content: VersionRequest, seconds: float = 120.0) -> list[int]:
        """Offer a version to everybody and wait until each phone has decided. Returns who adopted it."""
        if not any(model.name == MODEL for model in self.operator.models.list()):
            self.operator.models.create(MODEL, POPULATION)
        number = self.operator.models.register(MODEL, content).number
        self.operator.models.promote(MODEL, number)
        decided = phones.offered.setdefault(number, {})
        deadline = time.monotonic() + seconds
        while len(decided) < len(phones.configs):
            phones.listen(self._processes, 0.2)
            if time.monotonic() > deadline:
                raise CommandError(f"{len(phones.configs) - len(decided)} phones did not look at version {number}")
        return [person for person, what in decided.items() if what == "adopted"]

    def evaluate(self, phones: Phones, bundle: str, weights: str | None = None) -> float:
        """The accuracy over everybody's later windows, as a secure sum tells it to the server."""
        count = len(phones.configs)
        request = TaskRequest(
            name="measure",
            population=POPULATION,
            bundle=bundle,
            kind="evaluation",
            weights=weights,
            rounds=1,
            min_cohort=count,
            cohort=count,
            metrics={"accuracy": 1.0},
        )
        result = self._watch(phones, request)[-1].result
        if result is None:
            raise CommandError("an evaluation was committed without a result")
        return result.metrics["accuracy"]

    def _watch(
        self, phones: Phones, request: TaskRequest, on_round: Callable[[RoundInfo], None] = lambda info: None
    ) -> list[RoundInfo]:
        task = self.operator.tasks.create(request).task_id
        committed: dict[str, RoundInfo] = {}
        while True:
            # Asked for before the rounds: when it is over, they are all there.
            state = self.operator.tasks.get(task)
            phones.listen(self._processes, 0.2)
            for info in self.operator.tasks.rounds(task):
                if info.phase == "committed" and info.round_id not in committed:
                    committed[info.round_id] = info
                    on_round(info)
            if state.state in ("failed", "cancelled"):
                raise CommandError(f"the task {request.name!r} ended early ({state.state}): {state.reason}")
            if state.state == "completed":
                return list(committed.values())

    def _mint(self) -> bytes:
        seed = secrets.token_bytes(32)
        certificate = mint_token(self._enrolment, population=POPULATION, not_after=int(time.time()) + 86400, seed=seed)
        return encode(
            EnrolmentToken(
                server=self.address,
                server_key=self._server_key,
                enrolment_key=self._enrolment.public_key().public_bytes_raw(),
                publisher_keys=[self._publisher_key],
                population=POPULATION,
                seed=seed,
                certificate=certificate,
            )
        )


def personalise(phones: Phones, processes: Processes, personal: Personal, seconds: float = 600.0) -> None:
    """Without a server: every phone fits the model to its owner and measures; fills `phones.measured`."""
    phones.start(processes, personal)
    deadline = time.monotonic() + seconds
    while len(phones.measured) < len(phones.configs):
        phones.listen(processes, 0.2)
        if time.monotonic() > deadline:
            missing = [config.name for config in phones.configs if config.person not in phones.measured]
            raise CommandError(f"not measured after {seconds:.0f} s: {', '.join(missing)}")


def persons_of(info: RoundInfo, phones: Phones) -> Sequence[int]:
    """Whose updates are in the sum of this round."""
    return [phones.ids[device] for device in info.survivors]
