"""A process full of phones: `python phones.py CONFIG.json`.

Each phone has a folder, a key and an encrypted example store of its own. It is filled when the phone takes part for the
first time; the process reads nobody else's windows. Every line on standard output is an event of one phone, as JSON.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from people import earlier_and_later
from safetensors.numpy import load_file

from archipel.cli.start.local.events import HostEvent, Output
from archipel.cli.start.local.threads import follow_parent, run_until_stopped
from archipel.client import Agent, AgentConfig, Event, FileKeys, data_key
from archipel.datasets import HarByPerson, har_by_person
from archipel.errors import ArchipelError
from archipel.lite_runtime import ExampleStore, load, running_slot
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode

MODEL = "activity"


class PhoneConfig(msgspec.Struct, forbid_unknown_fields=True):
    """One phone: whose it is, its folder, its token file, and whether its owner lets it take part in training."""

    name: str
    person: int
    folder: str
    token: str
    contributes: bool


class Personal(msgspec.Struct, forbid_unknown_fields=True):
    """How phones fit the model to their owners.

    `key`: the publisher's, `parameters`: safetensors file of the federated version.
    """

    key: bytes
    parameters: str
    epochs: int
    batch_size: int
    lr: float
    seed: int


class PhonesConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`data`: folder of the data set. With `personal` the phones fit and measure, without it they take part."""

    parent: int
    data: str
    phones: list[PhoneConfig]
    personal: Personal | None = None


class Measured(msgspec.Struct, forbid_unknown_fields=True):
    """What a phone found on its owner's later windows: right answers of `later`, by model. All that it tells.

    `adopted`: it runs the federated version; otherwise it found that worse for its owner and kept the cloud's.
    """

    earlier: int
    later: int
    adopted: bool
    correct: dict[str, int]


class Phone:
    """`own`: its owner's windows, which go into the stores if these are empty."""

    def __init__(self, config: PhoneConfig, own: HarByPerson | None = None) -> None:
        self.config = config
        self.folder = Path(config.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        key = data_key(FileKeys(self.folder))
        self.earlier = ExampleStore.open(self.folder / "examples", key)
        self.later = ExampleStore.open(self.folder / "later", key)
        if own is not None and not len(self.earlier):
            for store, part in zip((self.earlier, self.later), earlier_and_later(own), strict=True):
                store.add_many({"input": part.inputs, "label": part.labels})

    def take_part(self, stop: threading.Event, output: Output) -> None:
        config = AgentConfig(
            folder=self.folder,
            attributes={"contributes": self.config.contributes},
            adopt=True,
            # A phone is silent for longer; here nobody wants to wait.
            look_seconds=2.0,
            # A phone has a process of its own for this; here many share one.
            isolated=False,
        )
        with Agent(config, examples=lambda: self._examples(agent), on_event=self._teller(output)) as agent:
            agent.enrol(decode("enrolment token", Path(self.config.token).read_bytes(), EnrolmentToken))
            agent.run_forever(stop)

    def personalise(self, personal: Personal) -> Measured:
        """Fit the version that this phone runs to its owner, and keep the result; the cloud's too, to compare."""
        runtime = load(running_slot(self.folder / "models" / MODEL), [personal.key])
        own, later = self.earlier.arrays(), self.later.arrays()
        running, federated = runtime.parameters(), load_file(personal.parameters)
        runtime.reset("parameters")
        cloud = runtime.parameters()
        correct: dict[str, int] = {}

        def measure(name: str, parameters: Mapping[str, np.ndarray], fit: bool = False) -> None:
            runtime.set_parameters(parameters)
            if fit:
                runtime.fit(
                    own,
                    epochs=personal.epochs,
                    batch_size=personal.batch_size,
                    seed=personal.seed,
                    hyperparameters={"lr": personal.lr},
                )
            correct[name] = int((runtime.predict(later["input"]).argmax(axis=1) == later["label"]).sum())

        measure("cloud", cloud)
        measure("federated", federated)
        measure("cloud, personalised", cloud, fit=True)
        measure("personalised", running, fit=True)
        runtime.save(self.folder / "personal")
        adopted = all(np.array_equal(running[name], federated[name]) for name in federated)
        return Measured(len(self.earlier), len(self.later), adopted, correct)

    def _examples(self, agent: Agent) -> Mapping[str, np.ndarray]:
        """Evaluations are of windows that no model has learnt from; an offered version is compared on the others."""
        newest = agent.rounds[-1:]
        evaluates = [entry.kind == "evaluation" and entry.step != "closed" for entry in newest] == [True]
        return (self.later if evaluates else self.earlier).arrays()

    def _teller(self, output: Output) -> Callable[[Event], None]:
        def tell(event: Event) -> None:
            about = "version" if event.name in ("adopted", "kept") else "reason"
            output.tell(self.config.name, event, str(event.detail.get(about, "")))

        return tell


def run(config: PhonesConfig, phone: PhoneConfig, output: Output, stop: threading.Event) -> None:
    """What one phone does, until `stop` or until it has measured."""
    try:
        if config.personal is None:
            Phone(phone, har_by_person(config.data, [phone.person])).take_part(stop, output)
        else:
            found = Phone(phone).personalise(config.personal)
            output.write(HostEvent(device=phone.name, event="measured", text=msgspec.json.encode(found).decode()))
    except ArchipelError as error:
        output.write(HostEvent(device=phone.name, event="failed", text=str(error)))


def main(path: str) -> None:
    config = msgspec.json.decode(Path(path).read_bytes(), type=PhonesConfig)
    follow_parent(config.parent)
    output = Output()

    def in_turn(stop: threading.Event) -> None:
        for phone in config.phones:
            run(config, phone, output, stop)

    works: list[Callable[[threading.Event], None]] = [in_turn]
    if config.personal is None:
        works = [partial(run, config, phone, output) for phone in config.phones]
    run_until_stopped(works)


if __name__ == "__main__":
    main(sys.argv[1])
