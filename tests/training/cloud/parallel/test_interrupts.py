"""Ctrl-C ends all processes of a training after the same batch."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from archipel.training.cloud.parallel.interrupts import noted_interrupts
from tests.support.ranks import start_ranks
from tests.training.cloud.parallel.trainings import facts, run


@pytest.mark.sampled(every=6, group="two processes")
def test_ctrl_c_in_one_process_ends_both_after_the_same_batch(of_two: list[dict[str, Any]]) -> None:
    expected = facts(run("ddp", "none"))
    for answer in of_two:
        found = answer["interrupted"]
        assert (found["ended"], found["seen"], found["usual"]) == ("KeyboardInterrupt", 5, True)
        assert len(found["files"]) == 2  # the file, and the shards that it names
        np.testing.assert_allclose(found["resumed"]["losses"], expected["losses"], atol=1e-5)


def test_a_second_ctrl_c_ends_at_once_and_other_handlers_stay() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        noted: list[str] = []
        with noted_interrupts(lambda: noted.append("first")):
            os.kill(os.getpid(), signal.SIGINT)
            assert noted == ["first"]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, own := lambda *_: noted.append("own"))
        with noted_interrupts(lambda: noted.append("second")):
            assert signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def elsewhere() -> None:
            with noted_interrupts(lambda: noted.append("third")):
                noted.append("in a thread")

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert noted == ["first", "in a thread"]
    finally:
        signal.signal(signal.SIGINT, before)


JOB = """
[model]
zoo = "mlp"
arguments = { features = 6, hidden = 8, classes = 4 }
[data]
train = "train.npz"
[train]
epochs = 100000
batch_size = 24
parallel = "ddp"
device = "cpu"
checkpoint_every = 1
[output]
folder = "out"
"""


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("train.npz", input=rng.normal(size=(96, 6)).astype(np.float32), label=rng.integers(0, 4, 96))
    Path("job.toml").write_text(JOB)
    ranks = start_ranks("-m", 2, "archipel", "train", "job.toml")
    try:
        while not Path("out/checkpoint/last.pt").exists() and ranks[0].poll() is None:
            time.sleep(0.05)
        ranks[1].send_signal(signal.SIGINT)
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130], errors
    told = [[line for line in each.splitlines() if "arn" not in line and line.strip()] for each in errors]
    assert told[1] == []
    assert told[0][-2:] == [
        "the checkpoint is in out/checkpoint; go on with: archipel train job.toml --resume", "archipel: interrupted",
    ]  # fmt: skip
