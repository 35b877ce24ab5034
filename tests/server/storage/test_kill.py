"""SIGKILL at every step of storing: before and after each request to the store and each change of the disk."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.commits import in_sample
from tests.support.places import Place

COURSE = """
import os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.places import settings_of
from archipel.server.storage.blobs import BlobStore
from archipel.server.storage.spool import UpdateSpool, sum_name
from archipel.server.storage import open_storage
import botocore.loaders, botocore.session, functools, s3fs  # loaded once, before forking

botocore.loaders.JSONFileLoader.load_file = functools.cache(botocore.loaders.JSONFileLoader.load_file)
JSON = botocore.loaders.JSONFileLoader()
botocore.loaders.JSONFileLoader.__new__ = lambda kind: JSON
botocore.session.get_session().create_client("s3", "us-east-1")
folder, blobs, kind, out = Path(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
LARGE = random.Random(5).randbytes((16 << 20) + 5)
CHANGES = {"open", "os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
# Both in pieces that are quick to look at; three parts, so that one is in the middle.
if kind == "blob in parts":
    from archipel.server.storage import s3
    s3.PART_BYTES, s3.ONE_PUT_BYTES = 6 << 20, 6 << 20


def course(note):
    settings = settings_of(folder, blobs)
    storage = open_storage(settings)
    if kind == "blob":
        note(BlobStore(storage).put(b"hello"))
    elif kind == "blob in parts":
        note(BlobStore(storage).put(LARGE))
    else:
        spool = UpdateSpool(storage)
        spool.open_round("r")
        written = spool.receive("r", [b"up", b"date"])
        spool.keep("r", "d", written)
        note(written.digest)
        total = spool.keep_sum("r", [b"sum"])
        note(total.digest)
        spool.drop("r", ["d." + written.digest])
        newer = spool.keep_sum("r", [b"newer sum"])
        note(newer.digest)
        spool.drop("r", [sum_name(total.digest)])


def run(number):
    seen = 0

    def point():
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def audited(event, arguments):
        if event in CHANGES and str(arguments[0]).startswith(str(folder)):
            point()

    if blobs.startswith("s3:"):
        from archipel.server.storage.s3 import Bucket
        call = Bucket._call

        def counted(*arguments, **more):
            point()
            answer = call(*arguments, **more)
            point()
            return answer

        Bucket._call = counted
    sys.addaudithook(audited)
    notes = open(out, "a", buffering=1)

    def note(digest):
        notes.write(digest + "\\n")
        point()

    course(note)
    return seen


def in_child(number):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            seen = run(number)
            Path(out + ".total").write_text(str(seen))
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


for line in sys.stdin:
    print(in_child(int(line)), flush=True)
"""


class Course:
    """A process that loads everything once and runs the course in children that are killed at a given step."""

    def __init__(self, place: Place, kind: str, out: Path) -> None:
        self.out = out
        root, settings = str(Path(__file__).parents[3]), place.settings
        self.process = subprocess.Popen(
            [sys.executable, "-c", COURSE, root, settings.folder, settings.blobs, kind, str(out)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, number: int) -> int:
        """Killed at that step, or to its end; returns the exit code. `acknowledged` says how far it came."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.out.write_text("")
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def acknowledged(self) -> list[str]:
        return self.out.read_text().split()

    def steps(self) -> int:
        return int(Path(f"{self.out}.total").read_text())

    def stop(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0


@pytest.mark.parametrize(
    ("place", "kind", "every"),
    [
        pytest.param("folder", "blob", 1, marks=pytest.mark.slow),
        ("folder", "round", 1),
        ("object store", "round", 5),
        pytest.param("object store", "blob", 1, marks=pytest.mark.slow),
        pytest.param("object store", "round", 1, marks=pytest.mark.slow),
        pytest.param("object store", "blob in parts", 1, marks=pytest.mark.slow),
    ],
    indirect=["place"],
)
@pytest.mark.sampled(every=8)
def test_killed_at_every_step(place: Place, tmp_path: Path, kind: str, every: int) -> None:
    """Or at one of `every` so many, others for each commit."""
    course = Course(place, kind, tmp_path / "acknowledged")
    # Once before, so that all folders are there in each run, as on a server.
    assert course.run(-1) == 0
    clean(place)
    assert course.run(-1) == 0
    whole, steps = place.files(), course.steps()
    assert len(whole) == 1
    killed_with_leftovers = 0
    for number in (step for step in range(1, steps + 1) if in_sample(step, every)):
        clean(place)
        assert course.run(number) == -9, number
        files, acknowledged = place.files(), course.acknowledged()
        for key, data in files.items():
            # Whatever can be seen is whole.
            assert hashlib.sha256(data).hexdigest() == key.rsplit("/", 1)[1].rsplit(".", 1)[-1], (number, key)
        there = {key[-64:] for key in files}
        if kind == "round":
            update, old, new = (acknowledged + [""] * 3)[:3]
            # At any step the newest acknowledged sum is there, and until there is one, the acknowledged update.
            assert not update or old or update in there, number
            assert not old or new or old in there, number
            assert not new or new in there, number
        else:
            assert set(acknowledged) <= there, number
        killed_with_leftovers += bool(place.leftovers())
        # The other processes go on, and the leftovers go when they are old.
        place.blobs.sweep(before=time.time() + 5)
        if kind == "round":
            place.spool.sweep(list)
        assert place.leftovers() == [], number
        if number % 3 == 0:
            # Another attempt ends as if nothing had been.
            assert course.run(-1) == 0
            assert place.files() == whole, number
    course.stop()
    assert killed_with_leftovers > 0
    assert steps >= {"blob": 5, "blob in parts": 5, "round": 14}[kind]


def clean(place: Place) -> None:
    for key in place.files():
        place.delete(key)
    place.spool.sweep(list)
    for path in Path(place.settings.folder).rglob("*"):
        if path.parent.name == "sha256" and path.is_file():
            os.unlink(path)
