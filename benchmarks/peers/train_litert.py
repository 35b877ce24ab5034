"""A training step in LiteRT: a file with its variables, one call of a signature a step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from train_steps import Arrays, Job, Step, serve


def train(job: Job, threads: int) -> Step:
    file = job.folder / "train.tflite"
    if not file.exists():
        # In a process of its own, whose memory does not count.
        script = Path(__file__).with_name("convert_step_litert.py")
        subprocess.run([sys.executable, script, job.folder], check=True)
    interpreter = Interpreter(str(file), num_threads=threads)
    run = interpreter.get_signature_runner("train")

    def step(feed: Arrays) -> float:
        x, y = feed.values()
        return float(np.asarray(run(x=x, y=y)["loss"]))

    return step


if __name__ == "__main__":
    serve({"litert": train})
