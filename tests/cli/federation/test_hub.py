"""`archipel models push` and `pull`, against a server over TCP."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch import nn

from archipel import bundle as b
from archipel.converter import Signing, convert
from tests.cli.federation.test_remote import served  # noqa: F401  (a fixture)
from tests.support.commands import Command
from tests.support.tiny_bundle import make_bundle


@pytest.mark.sampled(every=3)
def test_the_newest_version_that_fits(archipel: Command, served: Path) -> None:  # noqa: F811
    key = b.load_private_key(served / "publisher.key")
    (served / "own.pub").write_text(key.public_key().public_bytes_raw().hex())
    small, other = served / "tiny.bundle", make_bundle(served, key, name="a-tiny-model-with-a-much-longer-name")
    out, _ = archipel("models", "push", "digits", str(small), str(other), "--population", "pupils")
    assert [line.rpartition(": ")[2] for line in out.splitlines()] == ["version 1 of digits", "version 2 of digits"]
    pull = ["models", "pull", "digits", "--key", str(served / "own.pub"), "-o"]
    newest = served / "newest.bundle"
    assert "version 2 of digits" in archipel(*pull, str(newest))[0]
    assert newest.read_bytes() == other.read_bytes()
    assert "exists already" in archipel(*pull, str(newest), code=1)[1]
    assert other.stat().st_size > small.stat().st_size
    fitting = served / "fitting.bundle"
    out, _ = archipel(*pull, str(fitting), "--max-size", f"{small.stat().st_size}B")
    assert "version 1 of digits: the newest; no card states a figure" in out
    assert f"; version 2 has {other.stat().st_size:,} bytes\n" in out
    assert fitting.read_bytes() == small.read_bytes()
    for options, words in (
        (["--max-size", "10B"], "no version fits: version 2 has"),
        (["--max-size", "10"], "expected a number above 0 with a unit of B, kB"),
        (["--max-latency", "50%"], "expected a number above 0 with a unit of us"),
    ):
        assert words in archipel(*pull, str(served / "none.bundle"), *options, code=1)[1]
    stranger = b.generate_key().public_key().public_bytes_raw().hex()
    (served / "stranger.pub").write_text(stranger)
    archipel("models", "pull", "digits", "--key", str(served / "stranger.pub"), "-o", str(served / "none.bundle"),
             code=1)  # fmt: skip
    assert not (served / "none.bundle").exists()
    archipel("model", "reject", "digits", "2", "--reason", "too large")
    assert "version 1 of digits" in archipel(*pull, str(served / "last.bundle"))[0]


@pytest.mark.sampled(every=4)
def test_the_time_of_a_prediction(archipel: Command, served: Path) -> None:  # noqa: F811
    key = b.load_private_key(served / "publisher.key")
    (served / "own.pub").write_text(key.public_key().public_bytes_raw().hex())
    convert(nn.Linear(4, 3), served / "line.bundle", example=np.zeros((2, 4), np.float32), signing=Signing(key))
    archipel("models", "push", "line", str(served / "line.bundle"), "--population", "pupils")
    pull = ["models", "pull", "line", "--key", str(served / "own.pub"), "-o", str(served / "pulled.bundle")]
    assert "version 1 takes" in archipel(*pull, "--max-latency", "0.0001us", code=1)[1]
    assert "version 1 of line" in archipel(*pull, "--max-latency", "10s")[0]
    assert b.open_bundle(served / "pulled.bundle", [key.public_key().public_bytes_raw()]).manifest.name == "line"


@pytest.mark.sampled(every=3)
def test_the_most_accurate_version_that_fits(archipel: Command, served: Path) -> None:  # noqa: F811
    key = b.load_private_key(served / "publisher.key")
    (served / "own.pub").write_text(key.public_key().public_bytes_raw().hex())
    files = []
    for number, value in enumerate((0.90, 0.95, 0.93), 1):
        metrics = (b.CardMetric(name="accuracy", value=value, data="the test part", examples=1000),)
        card = b.ModelCard(name="tiny", description="Nothing.", task="none", metrics=metrics)
        (served / str(number)).mkdir()
        # The second is the most accurate, and the largest.
        name = "a-tiny-model-with-a-much-longer-name" if number == 2 else f"tiny{number}"
        files.append(make_bundle(served / str(number), key, name=name, card=card))
    archipel("models", "push", "tiny", *map(str, files), "--population", "pupils")
    pull = ["models", "pull", "tiny", "--key", str(served / "own.pub"), "-o"]

    def pulled(name: str, *options: str) -> tuple[str, int]:
        out, _ = archipel(*pull, str(served / name), *options)
        data = (served / name).read_bytes()
        return out, [file.read_bytes() for file in files].index(data) + 1

    out, number = pulled("best.bundle")
    assert number == 2
    assert "version 2 of tiny: most accurate of those small enough, accuracy 0.95 on the test part\n" in out
    out, number = pulled("newest.bundle", "--newest")
    assert number == 3
    assert "version 3 of tiny: the newest that fits\n" in out
    out, number = pulled("small.bundle", "--max-size", f"{files[1].stat().st_size - 1}B")
    assert number == 3
    assert "accuracy 0.93 on the test part; version 2 has" in out
