"""Log files of a bounded size, written to by several processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from archipel.server.storage.log_files import LogFile, bound

LINE = b"%d %d " + b"x" * 40 + b"\n"
WRITER = """
import sys
from pathlib import Path
from archipel.server.storage.log_files import LogFile
log = LogFile(Path(sys.argv[1]), most=2000, kept=1000)
for number in range(400):
    log.write(b"%d %d " % (int(sys.argv[2]), number) + b"x" * 40 + b"\\n")
"""


def lines(path: Path) -> list[bytes]:
    """Of all files, oldest first."""
    numbered = sorted(path.parent.glob(f"{path.name}.*"), key=lambda each: -int(each.suffix[1:]))
    return [line for each in (*numbered, path) if each.exists() for line in each.read_bytes().splitlines(keepends=True)]


@pytest.mark.sampled(every=4)
def test_no_line_is_lost_between_processes(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    found = lines(path)
    assert sorted(found) == sorted(LINE % (writer, number) for writer in range(4) for number in range(400))
    files = list(tmp_path.iterdir())
    assert len(files) > 30
    # The line that reaches the bound, and one that each of the others was about to write.
    assert all(each.stat().st_size < 2000 + 4 * len(LINE % (0, 100)) for each in files)


def test_threads_and_the_number_of_files(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    log = LogFile(path, most=1000, kept=2)
    threads = [
        threading.Thread(target=lambda each=each: [log.write(LINE % (each, number)) for number in range(100)])
        for each in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.name for each in tmp_path.iterdir()} <= {"requests.log", "requests.log.1", "requests.log.2"}
    assert 2 * 1000 <= sum(map(len, lines(path))) <= 3 * 1100
    # What is left is whole, and the newest of each thread.
    for each in range(4):
        kept = [int(line.split()[1]) for line in lines(path) if line.startswith(b"%d " % each)]
        assert kept == list(range(100))[100 - len(kept) :]


def test_none_kept_and_no_bound(tmp_path: Path) -> None:
    for most, kept in ((200, 0), (0, 3)):
        path = tmp_path / f"log-{most}"
        log = LogFile(path, most=most, kept=kept)
        for number in range(100):
            log.write(LINE % (0, number))
        assert [each.name for each in tmp_path.glob(f"{path.name}.*")] == []
        assert sum(map(len, lines(path))) < 200 if most else len(lines(path)) == 100


def test_another_program_may_rename_or_empty_it(tmp_path: Path) -> None:
    path = tmp_path / "requests.log"
    log = LogFile(path, most=0, kept=0)
    log.write(b"one\n")
    path.rename(tmp_path / "requests.log-20300101")
    log.write(b"two\n")
    assert path.read_bytes() == b"two\n"
    with open(path, "r+b") as file:
        file.truncate(0)
    log.write(b"three\n")
    assert path.read_bytes() == b"three\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_children_hold_open(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with open(path, "ab", buffering=0) as log:
        script = "import sys\nfor line in sys.stdin: print(line.strip() * 100, flush=True)"
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=log, text=True) as child:
            assert child.stdin is not None
            for letter in "abcd":
                size = path.stat().st_size
                child.stdin.write(f"{letter}\n")
                child.stdin.flush()
                deadline = time.monotonic() + 10
                while path.stat().st_size < size + 101:
                    assert time.monotonic() < deadline
                    time.sleep(0.002)
                bound(log, path, most=150, kept=2)
            child.stdin.close()
    assert {each.name: each.read_text()[::101] for each in tmp_path.iterdir()} == {
        "server.log": "",
        "server.log.1": "cd",
        "server.log.2": "ab",
    }


def test_a_file_that_nobody_writes_to_any_more_is_closed(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", most=0, kept=0)
    handle = log._handle
    assert os.path.samestat(os.fstat(handle), (tmp_path / "log").stat())
    del log
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)
    with pytest.raises(FileNotFoundError):
        LogFile(tmp_path / "missing" / "log", most=0, kept=0)
