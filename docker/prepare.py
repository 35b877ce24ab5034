"""Makes what the federation of compose.yml begins with: keys, tokens, a bundle, examples, a task, the server's folder.

    prepare.py http://server:8470

Each part is there whole or not at all, and a second run makes what is missing. It plays the publisher, the enroller and
the operator, whose private keys a real federation keeps on machines of their own.
"""

import hashlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import s3fs

from archipel.datasets import digits_by_writer, split_writers
from archipel.durable import creating_folder, write_durably
from archipel.server.http.pages import PAGE_FOLDER

TRIAL = Path("/var/lib/archipel")
"""The volume `trial`, of which every service gets a folder of its own."""
SERVER, OPERATOR, HANDOUT, METRICS = (TRIAL / name for name in ("server/data", "operator", "handout", "metrics"))
DEVICES = 3
TASK = """\
name = "digits"
population = "trial"
rounds = 20
min_cohort = 3
cohort = 3
"""


def main() -> None:
    server = sys.argv[1]
    for folder in (SERVER.parent, OPERATOR, HANDOUT):
        folder.mkdir(0o700, exist_ok=True)
    METRICS.mkdir(0o755, exist_ok=True)
    make_bucket(os.environ["ARCHIPEL_SERVER_BLOBS"])
    for name in ("publisher", "enrolment"):
        if not (OPERATOR / f"{name}.pub").exists():
            (OPERATOR / name).unlink(missing_ok=True)
            archipel("keys", name)
    if not (OPERATOR / "digits.bundle").exists():
        make_bundle()
    write_durably(OPERATOR / "task.toml", TASK.encode())
    if not (METRICS / "token").exists():
        # Prometheus runs as another user, and has this folder alone.
        write_durably(METRICS / "token", secrets.token_hex(32).encode(), mode=0o644)
    if not (SERVER / "server.toml").exists():
        make_server()
    make_handout(server)


def archipel(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("archipel"), *arguments], cwd=OPERATOR, check=True)


def make_bucket(blobs: str) -> None:
    bucket = blobs.removeprefix("s3://").partition("/")[0]
    store = s3fs.S3FileSystem()
    if not store.exists(bucket):
        store.mkdir(bucket)


def make_bundle() -> None:
    """Of the model of the server's own page, for cohorts of three that trust the server's operator with no more."""
    published = json.loads((PAGE_FOLDER / "model" / "publisher.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        key, model = Path(folder) / "page.pub", Path(folder) / "digits.onnx"
        key.write_text(published["key"])
        archipel("export", PAGE_FOLDER / "model" / "digits.bundle", "--key", key, "-o", model)
        archipel(
            "convert", model, "-o", "digits.bundle", "--key", "publisher", "--loss", "cross_entropy", "--lr", "0.02",
            "--strategy", "fedavg", "--strategy-option", "clip=1.0", "--strategy-option", "value_range=0.5",
            "--strategy-option", "bits=16", "--epochs", "1", "--batch-size", "10",
            "--policy-option", "min_cohort=3", "--policy-option", "colluders=0.0", "--policy-option", "threshold=0.67",
        )  # fmt: skip


def make_server() -> None:
    digest = hashlib.sha256((METRICS / "token").read_bytes()).hexdigest()
    (OPERATOR / "operator.token").unlink(missing_ok=True)
    with creating_folder(SERVER, 0o700) as made:
        archipel(
            "serve", "init", made, "--enrolment-key", "enrolment.pub", "--publisher-key", "publisher.pub",
            "--token-file", "operator.token",
        )  # fmt: skip
        with (made / "server.toml").open("a") as settings:
            settings.write(f'metrics_token_sha256 = "{digest}"\n')


def make_handout(server: str) -> None:
    """A folder for each device: a one-time token, and the handwriting of one person."""
    digits = digits_by_writer()
    writers = split_writers(digits, devices=DEVICES, seed=0).devices
    for number, writer in enumerate(writers, start=1):
        if (HANDOUT / str(number)).exists():
            continue
        own = digits.of([writer])
        with creating_folder(HANDOUT / str(number), 0o700) as folder, tempfile.TemporaryDirectory() as tokens:
            np.savez(folder / "data.npz", input=own.inputs(), label=own.targets())
            archipel(
                "token", "--enrolment-key", "enrolment", "--server-key", SERVER / "server.key.pub",
                "--publisher-key", "publisher.pub", "--server", server, "--allow-http", "--population", "trial",
                Path(tokens) / "made",
            )  # fmt: skip
            (token,) = (Path(tokens) / "made").iterdir()
            write_durably(folder / "token", token.read_bytes())


if __name__ == "__main__":
    main()
