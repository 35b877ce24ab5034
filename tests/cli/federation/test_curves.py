"""What `archipel task watch`, `task metrics` and `round show` say of the metrics of a training's rounds."""

from __future__ import annotations

import csv
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure
from werkzeug.serving import make_server

from archipel.errors import ClientError, MissingExtraError
from archipel.operator import OperatorClient, RoundMetrics
from archipel.operator.curves import curves, draw, plot, write_tensorboard
from archipel.protocol.metrics.training_result import split_metrics
from archipel.protocol.vector import DecodedSum
from archipel.server.database.tables import Round
from tests.server.rounds.test_evaluating import PLAIN, evaluate, train
from tests.support.fixtures.server import *  # noqa: F403
from tests.support.in_thread import in_thread
from tests.support.world import World

Command = Callable[..., tuple[str, str]]


@pytest.fixture
def trained(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, str]]:
    """Two rounds of a training, whose second version was evaluated. The fixture's bundle reports no metrics, so the
    rounds have the results of sums that three devices of another would have sent."""
    task = world.create_task(rounds=2, evaluate_every=2, **PLAIN)
    devices = world.add_devices(3)
    train(world, devices)
    train(world, devices)
    evaluate(world, devices, 0.5)
    for number, (loss, clipped) in enumerate(((3.0, 2.0), (1.5, 0.0)), 1):
        sums = {
            "archipel/training/loss": loss, "archipel/training/accuracy": 0.75 * number,
            "archipel/clamped/loss": 0.5 if number == 1 else 0.0, "archipel/clamped/accuracy": 0.0,
            "archipel/devices/update/clipped": clipped, "archipel/devices/update/capped": 1.0,
        }  # fmt: skip
        values = {name: np.float64(value) for name, value in sums.items()}
        result, _ = split_metrics(DecodedSum({}, values, weight=1.5), 3)  # type: ignore[arg-type]
        with world.services.database.write() as session:
            row = session.query(Round).where(Round.task_id == task["task_id"], Round.number == number).one()
            row.result = msgspec.to_builtins(result)
            row.ended = row.started + 4.25
    with in_thread(make_server("127.0.0.1", 0, world.app, threaded=True)) as web:
        monkeypatch.setenv("ARCHIPEL_SERVER", f"http://127.0.0.1:{web.server_port}")
        monkeypatch.setenv("ARCHIPEL_TOKEN", world.operator_token)
        yield world, task["task_id"]


@pytest.mark.sampled(every=4)
def test_watch_says_of_each_round_how_it_went_and_where_the_model_is(
    archipel: Command, trained: tuple[World, str]
) -> None:
    world, task = trained
    shown = archipel("task", "watch", task)[0].splitlines()
    rounds = [re.sub(r"[0-9.]+ k?B up and [0-9.]+ k?B down", "BYTES", line) for line in shown]
    model = world.task(task)["model"]
    size = len(world.operator("GET", f"/v1/blobs/{model}")[1])
    assert rounds == [
        "digits: training over pupils, plain, 2 of 2 rounds, completed",
        "round 1: committed in 4.2 s, 3 of 3 devices in the sum, BYTES, "
        "training accuracy 0.5, training loss 2 (beyond its range), 2 clipped",
        "round 2: committed in 4.2 s, 3 of 3 devices in the sum, BYTES, "
        "training accuracy 1, training loss 1, 0 clipped",
        "  version 2: evaluation accuracy 0.75, evaluation loss 0.5",
        "completed: 2 of 2 rounds in 2 s",
        f"model: weights {model[:12]} of round 2, {size} B: archipel task download {task} FILE",
    ]


@pytest.mark.sampled(every=4)
def test_metrics_as_a_table_as_csv_and_as_a_picture(
    archipel: Command, trained: tuple[World, str], tmp_path: Path
) -> None:
    table, picture = tmp_path / "rounds.csv", tmp_path / "curves.svg"
    shown = archipel("task", "metrics", trained[1], "--csv", str(table), "--plot", str(picture))[0].splitlines()
    assert re.split(r"  +", shown[0])[-3:] == ["clipped", "weights", "result"]
    assert "2 of 3  " in shown[1]
    assert shown[2].endswith("evaluation accuracy 0.75, evaluation loss 0.5, training accuracy 1, training loss 1")
    assert shown[3:] == [f"written to {table}", f"written to {picture}"]
    first, second = csv.DictReader(table.read_text().splitlines())
    assert (first["round"], first["seconds"], first["devices"], first["clip"]) == ("1", "4.25", "3", "")
    assert (float(first["training loss"]), float(first["clipped share"])) == (2.0, 2 / 3)
    assert (first["evaluation loss"], float(second["evaluation loss"])) == ("", 0.5)
    # The legend's texts are drawn as shapes, which the file names in comments.
    assert {"training loss", "evaluation accuracy", "clipped share"} <= set(
        re.findall(r"<!-- (.+?) -->", picture.read_text())
    )
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    below = picture.read_text().split('id="axes_3"')[1]
    # Rounds have whole numbers.
    assert re.findall(r'id="xtick_\d+".*?<!-- (.+?) -->', below, re.DOTALL) == ["1", "2"]


@pytest.mark.sampled(every=3)
def test_round_show_says_how_many_were_clipped(archipel: Command, trained: tuple[World, str]) -> None:
    first = trained[0].rounds(trained[1])[0]["round_id"]
    shown = archipel("round", "show", first)[0]
    assert "training loss           2   beyond its range on devices with 33.3% of the examples" in shown
    assert "clipped                 2 of 3 devices had their update clipped\n" in shown
    assert "capped                  1 of 3 devices have more examples than count\n" in shown


@pytest.mark.sampled(every=4)
def test_tensorboard(trained: tuple[World, str], tmp_path: Path) -> None:
    rounds = read(trained)
    write_tensorboard(rounds, tmp_path / "run")
    [file] = (tmp_path / "run").iterdir()
    assert file.name.startswith("events.out.tfevents.")
    assert all(name.replace(" ", "/").encode() in file.read_bytes() for name in curves(rounds))
    with pytest.raises(ClientError, match="has event files already"):
        write_tensorboard(rounds, tmp_path / "run")


@pytest.mark.sampled(every=4)
def test_what_cannot_be_drawn(trained: tuple[World, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = read(trained)
    with pytest.raises(ClientError, match=r"curves.bmp: the name of a plot must end in one of .png, .svg, .pdf"):
        plot(rounds, tmp_path / "curves.bmp")
    with pytest.raises(ClientError, match="no curves: of 0 committed rounds none has metrics"):
        plot([], tmp_path / "curves.png")
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'archipel\[curves\]'"):
        write_tensorboard(rounds, tmp_path / "run")


def read(trained: tuple[World, str]) -> list[RoundMetrics]:
    with OperatorClient(os.environ["ARCHIPEL_SERVER"], trained[0].operator_token) as client:
        return list(client.tasks.metrics(trained[1]))


@pytest.mark.parametrize(
    ("losses", "scale"), [((2000.0, 0.5, 0.4), "log"), ((2.0, 0.5), "linear"), ((9.0, 0.0), "linear")]
)
def test_one_loss_far_off_does_not_flatten_the_others(
    losses: tuple[float, ...], scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *given, **named: drawn.append(self))
    draw({"training loss": list(enumerate(losses, 1)), "accuracy": [(1, 0.001), (2, 0.9)]}, tmp_path / "a.png")
    assert [axes.get_yscale() for axes in drawn[0].axes] == [scale, "linear"]


@pytest.mark.sampled(every=3)
def test_a_legend_hides_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves in all corners."""
    drawn: list[Figure] = []
    real = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **named: (drawn.append(self), real(self, *given, **named))
    )
    draw({"loss": [(1, 0.0), (1, 9.0), (2, 0.0), (2, 9.0)], "accuracy": [(1, 0.1), (2, 0.9)]}, tmp_path / "a.svg")
    for axes in drawn[0].axes:
        assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())
