"""examples/activity end to end: on made-up people in a few seconds, and on the 30 real ones in the long suite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from archipel.client import Agent, AgentConfig, FileKeys, data_key
from archipel.datasets import HarByPerson, har_by_person
from archipel.lite_runtime import ExampleStore

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "activity"
PUBLISHED = ROOT.parent / "shared" / "data" / "hapt_har"
PARAMETERS = 17_094
MASKED = 3 * (PARAMETERS + 1)  # bytes of a masked update: three for each parameter, and for the weight


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example's experiment module, and through it the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        import experiment

        yield experiment


@pytest.fixture(scope="module")
def made_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve people, two recordings each; an activity is a posture and a frequency, and each person's are a bit off."""
    rng = np.random.default_rng(0)
    time = np.arange(320) / 50
    signals, activities = [], []
    for person in range(12):
        for _ in range(2):
            for bout in range(12):
                activity = bout % 6
                wave = np.sin(2 * np.pi * (1 + activity + 0.1 * person) * time)[:, None]
                signal = 200 * wave * (activity < 3) + 300 * np.sin(np.arange(6) + activity + 0.05 * person)
                signals += [signal + rng.normal(0, 30, signal.shape), np.zeros((30, 6))]
                activities += [np.full(320, activity + 1), np.zeros(30)]
    folder = tmp_path_factory.mktemp("made-up")
    np.savez(
        folder / "hapt_raw.npz",
        signal=np.concatenate(signals).astype(np.int16),
        scale=np.full(6, 1 / 300),
        activity=np.concatenate(activities).astype(np.uint8),
        offset=np.arange(25, dtype=np.int64) * 12 * 350,
        user=np.repeat(np.arange(1, 13), 2).astype(np.uint8),
        train_users=np.arange(1, 10, dtype=np.uint8),
        test_users=np.arange(10, 13, dtype=np.uint8),
    )
    return folder


def published() -> Path:
    if not PUBLISHED.is_dir():
        message = f"the published data set is not at {PUBLISHED}"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)
    return PUBLISHED


def pieces(windows: HarByPerson, scale: np.ndarray) -> set[bytes]:
    """Half a second of some windows' first channel, as the phone holds it and as the sensor gave it."""
    first = windows.inputs[::40, 0, :25]
    return {row.tobytes() for row in first} | {np.rint(row / scale[0]).astype(np.int16).tobytes() for row in first}


def holding(folder: Path, wanted: set[bytes]) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if any(piece in content for content in [path.read_bytes()] for piece in wanted)]


def check(run: Any, folder: Path, data: Path, rounds: int) -> None:
    """What holds whatever was learnt."""
    windows = har_by_person(data)
    scale = np.load(data / "hapt_raw.npz")["scale"]
    assert [row.number for row in run.rounds] == list(range(1, rounds + 1))
    for row in run.rounds:
        assert 0.75 * 0.75 * len(windows.train_people) <= row.devices <= row.assigned
    assert sum(person.rounds for person in run.people) == sum(row.devices for row in run.rounds)
    # The phones counted, each for itself; the server knows only the secure sum, and it is the same.
    for model, told in run.secure.items():
        assert told == pytest.approx(run.over_windows(model), abs=2e-4)

    assert [person.person for person in run.people] == sorted((*windows.train_people, *windows.test_people))
    for person in run.people:
        own = windows.take(windows.people == person.person)
        assert person.earlier + person.later == len(own)
        # What a phone sends of all its windows (3 kB each) is as long for everybody, and looks like noise.
        assert MASKED * person.rounds <= person.sent <= 1.5 * MASKED * person.rounds
        phone = folder / "phones" / f"person-{person.person:02}"
        with ExampleStore.open(phone / "examples", data_key(FileKeys(phone))) as store:
            kept = store.arrays()
        with ExampleStore.open(phone / "later", data_key(FileKeys(phone))) as store:
            later = store.arrays()
        both = np.concatenate([kept["input"], later["input"]])
        assert {row.tobytes() for row in both} == {row.tobytes() for row in own.inputs}
        with Agent(AgentConfig(folder=phone), examples=dict) as agent:
            journal = agent.rounds
        assert {entry.privacy for entry in journal} == {"secure"}
        trained = [entry for entry in journal if entry.kind == "training" and entry.result == "took_part"]
        assert len(trained) == person.rounds
        assert {entry.examples for entry in trained} <= {person.earlier}
        assert {entry.examples for entry in journal if entry.kind == "evaluation"} == {person.later}
        assert person.rounds == 0 or person.group != "newcomer"

    secret = pieces(windows, scale)
    (folder / "seen").mkdir()
    (folder / "seen" / "window").write_bytes(windows.inputs[40].tobytes())
    assert holding(folder / "seen", secret) == [folder / "seen" / "window"]  # the search finds what is there
    assert holding(folder / "server", secret) == []
    assert holding(folder / "phones", secret) == []


@pytest.mark.sampled(every=8)
def test_made_up_people_from_cloud_to_own_models(example: ModuleType, made_up: Path, tmp_path: Path) -> None:
    said: list[str] = []
    run = example.run(example.Options(made_up, rounds=2, volunteers=2), tmp_path, said.append)
    check(run, tmp_path, made_up, rounds=2)
    assert any(text.startswith("round 2:") for text in said)
    adopted = sum(person.adopted for person in run.people)
    assert f"the federated version: adopted by {adopted} of 12 phones" in said

    from origin import Origin
    from plot import draw_people
    from results import Results, report

    other = msgspec.structs.replace(run, seed=1, secure={"cloud": 0.5, "federated": 0.25})
    page = report(Results(Origin("2026-01-02", "abc", False, "2 x P", {"numpy": "1.2"}), [run, other]))
    assert page.startswith("Measured on 2026-01-02, commit abc **with uncommitted changes**, on 2 x P; numpy 1.2.\n")
    mean = 100 * run.accuracies("federated").mean()
    assert f"{mean:.1f} [{mean:.1f}, {mean:.1f}]" in page
    assert "seed 1: cloud 50.00%, federated 25.00%" in page
    assert sum(line.endswith("|") and line.split("|")[1].strip().isdigit() for line in page.splitlines()) == 12
    draw_people([run, other], tmp_path / "people.svg")
    assert "personalised" in (tmp_path / "people.svg").read_text()


@pytest.mark.sampled(every=4)
def test_who_is_served_worse_is_shown(example: ModuleType) -> None:
    from results import MODELS, Person, Run, worse_table

    def person(number: int, *correct: int) -> Any:
        return Person(number, "contributor", 1, 1, 10, 200, True, dict(zip(MODELS, correct)))

    # Of 200 windows, in the order of MODELS: cloud, federated, personalised, cloud personalised.
    people = [person(7, 100, 90, 120, 121), person(8, 100, 150, 140, 130), person(9, 100, 100, 100, 100)]
    runs = [Run(seed, people, [], {}, 1.0, 1) for seed in range(2)]
    assert worse_table(runs).splitlines()[2:] == [
        "| 7 | cloud → federated | 50.0 | 45.0 | -5.0 |",
        "| 8 | federated → personalised | 75.0 | 70.0 | -5.0 |",
        "| 7 | personalised: of cloud → of federated | 60.5 | 60.0 | -0.5 |",
    ]


@pytest.mark.sampled(every=4)
def test_no_window_to_measure_on_has_a_sample_that_was_learnt_from(example: ModuleType, made_up: Path) -> None:
    from people import earlier_and_later

    windows = har_by_person(made_up)
    earlier, later = earlier_and_later(windows)
    assert len(earlier) + len(later) == len(windows)
    assert not set(earlier.bouts) & set(later.bouts)
    for recording in np.unique(windows.recordings):
        for activity in range(6):
            own = [part.bouts[(part.recordings == recording) & (part.labels == activity)] for part in (earlier, later)]
            assert own[0].max() < own[1].min()
    # A neighbour of a window has half of it, so of every row of 64 samples two would be there twice.
    rows = [{window[:, :64].tobytes() for window in part.inputs} for part in (earlier, later)]
    rows += [{window[:, 64:].tobytes() for window in part.inputs} for part in (earlier, later)]
    assert rows[0] & rows[2]
    assert not (rows[0] | rows[2]) & (rows[1] | rows[3])


@pytest.mark.sampled(every=8)
def test_what_is_wrong_is_said_in_a_line(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "hapt_raw.npz" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.sampled(every=3)
def test_the_readme_says_what_was_measured(example: ModuleType) -> None:
    """Its rows are the report's, those of people who are served worse all of them; the report is of results.json."""
    from results import Results, report, worse_table

    results = msgspec.json.decode((FOLDER / "results" / "results.json").read_bytes(), type=Results)
    text = (FOLDER / "results" / "report.md").read_text()
    assert text == report(results)
    assert results.origin.clean
    readme = (FOLDER / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith(("| all |", "| took part |", "| newcomers |"))]
    assert len(rows) == 6
    assert set(rows) <= set(text.splitlines())
    assert worse_table(results.runs) in readme
    assert str(results.origin) in " ".join(readme.split())


@pytest.mark.slow
def test_thirty_people_gain(example: ModuleType, tmp_path: Path) -> None:
    """What README.md claims, of a single seed and half of its rounds."""
    run = example.run(example.Options(published(), rounds=6), tmp_path)
    check(run, tmp_path, published(), rounds=6)
    cloud, federated, personal = (100 * run.accuracies(name) for name in ("cloud", "federated", "personalised"))
    assert federated.mean() > cloud.mean() + 1
    assert personal.mean() > federated.mean() + 1
    assert personal.min() > federated.min() - 2
    assert run.accuracies("federated", "newcomer").mean() > run.accuracies("cloud", "newcomer").mean()
