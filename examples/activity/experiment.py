"""One experiment from the cloud to everybody's own model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cloud
import msgspec
from federation import Federation, Phones, cohort_of, least_of, personalise, persons_of
from people import draw_groups
from phones import Personal
from results import Person, Round, Run
from safetensors.numpy import save_file

from archipel.bundle import generate_key
from archipel.cli.start.local.processes import Processes
from archipel.datasets import har_by_person
from archipel.protocol.operator.registry import VersionRequest
from archipel.protocol.operator.tasks import RoundInfo

PERSONAL_RATE = 0.01
PERSONAL_EPOCHS = 5


@dataclass(frozen=True)
class Options:
    """`data`: folder of hapt_raw.npz; `volunteers`: how many people the cloud learns from, one of them to stop by."""

    data: Path
    rounds: int = 12
    volunteers: int = 5
    seed: int = 0


def run(options: Options, folder: Path, say: Callable[[str], None] = lambda text: None) -> Run:
    """Everything in the new folder `folder`: `server` is the server's, `phones/person-NN` that of a person's phone."""
    started = time.monotonic()
    key = generate_key()
    public = key.public_key().public_bytes_raw()
    windows = har_by_person(options.data)
    groups = draw_groups(windows, options.volunteers, options.seed)
    say(f"cloud: training on {len(groups.volunteers)} volunteers")
    module = cloud.train(windows, groups.volunteers, options.seed)
    # A third of each cohort may work with the server: the policy is about the others.
    cohort, everybody = cohort_of(len(groups.contributors)), len(groups.everybody)
    file = cloud.publish(module, key, folder, least_of(cohort) - cohort // 3, everybody - everybody // 3)
    # From here on this process knows nobody's windows.
    del windows, module

    rounds: list[Round] = []
    joined = dict.fromkeys(groups.everybody, 0)
    sent = dict.fromkeys(groups.everybody, 0)
    phones = Phones(folder, options.data, groups)
    processes = Processes(folder)
    try:
        federation = Federation(folder, processes, public)
        say(f"server and {len(phones.configs)} phones: enrolling")
        federation.enrol(phones)

        def on_round(info: RoundInfo) -> None:
            took = (info.ended or info.started) - info.started
            rounds.append(Round(info.number, len(info.participants), len(info.survivors), took))
            for person in persons_of(info, phones):
                joined[person] += 1
                sent[person] += phones.sent.get((person, info.round_id), 0)
            say(f"round {info.number}: {len(info.survivors)} of {len(info.participants)} phones, {took:.1f} s")

        digest = federation.operator.bundles.upload(file).digest
        federation.promote(phones, VersionRequest(bundle=digest))
        last = federation.train(phones, digest, len(groups.contributors), options.rounds, on_round)
        adopted = federation.promote(phones, VersionRequest(task_id=last.task_id))
        say(f"the federated version: adopted by {len(adopted)} of {len(phones.configs)} phones")
        say("secure evaluations on everybody's later windows")
        secure = {
            "cloud": federation.evaluate(phones, digest),
            "federated": federation.evaluate(phones, digest, last.weights_out),
        }
        if last.weights_out is None:
            raise RuntimeError("a committed round of training without weights")
        parameters = folder / "federated.safetensors"
        save_file(federation.operator.weights.read(last.weights_out), parameters)
    finally:
        processes.close()
    peak_memory = processes.peak_memory

    say("every phone: fitting to its owner, measuring")
    processes = Processes(folder)
    try:
        personal = Personal(public, str(parameters), PERSONAL_EPOCHS, cloud.BATCH_SIZE, PERSONAL_RATE, options.seed)
        personalise(phones, processes, personal)
    finally:
        processes.close()
    peak_memory = max(peak_memory, processes.peak_memory)
    people = [
        Person(person, groups.of(person), joined[person], sent[person], **msgspec.structs.asdict(found))
        for person, found in sorted(phones.measured.items())
    ]
    return Run(options.seed, people, rounds, secure, time.monotonic() - started, peak_memory)
