"""Makes what the federation of compose.yml begins with: keys, tokens, a bundle, examples, a task, the servers' folders.

    prepare.py root http://server:8470
    prepare.py site http://edge-1:8470 1

Each part is there whole or not at all, and a second run makes what is missing. `root` plays the publisher, and the
enroller and the operator of the root server; `site` those of an edge server. A real federation keeps their private keys
on machines of their own. What a site needs of the root is in its folder of SITES, which it finds as GIVEN.
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

VOLUME = Path("/var/lib/archipel")
"""The volume `trial`, or that of a site, of which every service gets a folder of its own."""
SERVER, OPERATOR, HANDOUT, METRICS, SITES = (
    VOLUME / name for name in ("server/data", "operator", "handout", "metrics", "sites")
)
GIVEN = Path("/given")
EDGES = 2
DEVICES = 3
"""At each edge server."""
TASK = f"""\
name = "digits"
population = "sites"
rounds = 20
min_cohort = {EDGES}
cohort = {EDGES}
"""
POLICY = f"""\
# Three devices hide each other from whoever runs the servers, and no more: a policy for trying out.
min_cohort = {DEVICES}
threshold = 0.67
colluders = 0.0

[aggregators]
min_site_cohort = {DEVICES}
max_site_cohort = {DEVICES}
min_cohort = {EDGES}
"""


def main() -> None:
    part, server, *number = sys.argv[1:]
    for folder in (SERVER.parent, OPERATOR):
        folder.mkdir(0o700, exist_ok=True)
    if part == "root":
        prepare_root(server)
    else:
        prepare_site(server, int(number[0]))


def prepare_root(server: str) -> None:
    SITES.mkdir(0o700, exist_ok=True)
    METRICS.mkdir(0o755, exist_ok=True)
    make_bucket(os.environ["ARCHIPEL_SERVER_BLOBS"])
    make_keys("publisher")
    make_keys("enrolment")
    write_durably(OPERATOR / "policy.toml", POLICY.encode())
    write_durably(OPERATOR / "task.toml", TASK.encode())
    if not (OPERATOR / "digits.bundle").exists():
        make_bundle()
    if not (METRICS / "token").exists():
        # Prometheus runs as another user, and has this folder alone.
        write_durably(METRICS / "token", secrets.token_hex(32).encode(), mode=0o644)
    digest = hashlib.sha256((METRICS / "token").read_bytes()).hexdigest()
    publisher = OPERATOR / "publisher.pub"
    make_server(publisher, digest)
    for number in range(1, EDGES + 1):
        if not (SITES / str(number)).exists():
            with creating_folder(SITES / str(number), 0o700) as folder:
                write_durably(folder / "publisher.pub", publisher.read_bytes())
                write_durably(folder / "metrics.sha256", digest.encode())
                write_durably(folder / "upstream.token", token(server, publisher, "sites", "--aggregator"))


def prepare_site(server: str, number: int) -> None:
    HANDOUT.mkdir(0o700, exist_ok=True)
    make_keys("enrolment")
    publisher, upstream = GIVEN / "publisher.pub", GIVEN / "upstream.token"
    make_server(
        publisher, (GIVEN / "metrics.sha256").read_text(),
        "--upstream-token", upstream, "--upstream-population", "devices", "--upstream-cohort", str(DEVICES),
    )  # fmt: skip
    digits = digits_by_writer()
    writers = split_writers(digits, devices=EDGES * DEVICES, seed=0).devices[(number - 1) * DEVICES :]
    for device, writer in enumerate(writers[:DEVICES], start=1):
        if not (HANDOUT / str(device)).exists():
            # One-time token, and the handwriting of one person.
            own = digits.of([writer])
            with creating_folder(HANDOUT / str(device), 0o700) as folder:
                np.savez(folder / "data.npz", input=own.inputs(), label=own.targets())
                write_durably(folder / "token", token(server, publisher, "devices", "--upstream-token", upstream))


def archipel(*arguments: str | Path) -> None:
    subprocess.run([Path(sys.executable).with_name("archipel"), *arguments], cwd=OPERATOR, check=True)


def make_bucket(blobs: str) -> None:
    bucket = blobs.removeprefix("s3://").partition("/")[0]
    store = s3fs.S3FileSystem()
    if not store.exists(bucket):
        store.mkdir(bucket)


def make_keys(name: str) -> None:
    if not (OPERATOR / f"{name}.pub").exists():
        (OPERATOR / name).unlink(missing_ok=True)
        archipel("keys", name)


def make_bundle() -> None:
    """Of the model of the root server's own page, with the policy above."""
    published = json.loads((PAGE_FOLDER / "model" / "publisher.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        key, model = Path(folder) / "page.pub", Path(folder) / "digits.onnx"
        key.write_text(published["key"])
        archipel("export", PAGE_FOLDER / "model" / "digits.bundle", "--key", key, "-o", model)
        archipel(
            "convert", model, "-o", "digits.bundle", "--key", "publisher", "--loss", "cross_entropy", "--lr", "0.02",
            "--strategy", "fedavg", "--strategy-option", "clip=1.0", "--strategy-option", "value_range=0.5",
            "--strategy-option", "bits=16", "--epochs", "1", "--batch-size", "10", "--policy", "policy.toml",
        )  # fmt: skip


def make_server(publisher: Path, metrics_digest: str, *upstream: str | Path) -> None:
    """The server's folder. `upstream`: options of an edge server."""
    if (SERVER / "server.toml").exists():
        return
    (OPERATOR / "operator.token").unlink(missing_ok=True)
    with creating_folder(SERVER, 0o700) as made:
        archipel(
            "serve", "init", made, "--enrolment-key", "enrolment.pub", "--publisher-key", publisher,
            "--token-file", "operator.token", *upstream,
        )  # fmt: skip
        settings = made / "server.toml"
        text = settings.read_text()
        # Before the tables, of which it would be one of the settings.
        settings.write_text(f'metrics_token_sha256 = "{metrics_digest}"\n{text}')


def token(server: str, publisher: Path, population: str, *options: str | Path) -> bytes:
    """A one-time token with which somebody joins this server."""
    with tempfile.TemporaryDirectory() as folder:
        archipel(
            "token", "--enrolment-key", "enrolment", "--server-key", SERVER / "server.key.pub", "--publisher-key",
            publisher, "--server", server, "--allow-http", "--population", population, *options, Path(folder) / "made",
        )  # fmt: skip
        (made,) = (Path(folder) / "made").iterdir()
        return made.read_bytes()


if __name__ == "__main__":
    main()
