"""How many connections a web process may have, at each limit of open files that a system may set."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

# In a process of its own, as nobody but root raises a limit again that is lowered.
ALLOW = """
import resource, sys
from archipel.errors import ServerError
from archipel.server.processes.open_files import allow_connections
from archipel.server.settings import Settings
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
key = 64 * "0"
settings = Settings(
    folder="unused", enrolment_key=key, publisher_keys=(key,), operator_token_sha256=key, threads=16, demo=False,
    docs=False,
)
try:
    print(allow_connections(settings))
except ServerError as error:
    print(error)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("soft", "hard", "connections", "raised"),
    [
        # 128 files of the process and 6 of each of 16 threads are 224.
        (256, 5000, 4000, 4224),
        (256, 1024, 800, 1024),
        (4500, 5000, 4000, 4500),
        (64, 288, 64, 288),
    ],
    ids=["enough", "fewer", "already", "fewest"],
)
def test_a_process_takes_as_many_connections_as_it_may_have_files(
    soft: int, hard: int, connections: int, raised: int
) -> None:
    assert allow(soft, hard) == [str(connections), f"{raised} {hard}"]


def test_too_few_files_are_an_error_that_says_how_many_are_needed() -> None:
    said, limits = allow(64, 287)
    assert "may have 287 open files here, and a web process of this server needs 288; raise the limit" in said
    assert limits == "287 287"


def allow(soft: int, hard: int) -> list[str]:
    """The lines that ALLOW prints at these limits."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < hard:
        pytest.skip(f"this process may have {most} files, and the test needs {hard}")
    command = [sys.executable, "-c", ALLOW, str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
