"""The first messages of a kind may be decoded by several threads at once: servers and embedded agents do so."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = """
import sys, threading
from typing import Annotated
import msgspec
from msgspec import Meta
from archipel.protocol.sealed import decode

sys.setswitchinterval(1e-6)
fields = [(f"f{n}", Annotated[bytes, Meta(min_length=n, max_length=32)]) for n in range(8)]
data = msgspec.json.encode({name: b"k" * 32 for name, _ in fields})
right = []

def work(kind, barrier):
    barrier.wait()
    right.append(decode("message", data, kind).f7 == b"k" * 32)

for _ in range(100):
    kind, barrier = msgspec.defstruct("Message", fields), threading.Barrier(8)
    threads = [threading.Thread(target=work, args=(kind, barrier)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
sys.exit(right != [True] * 800)
"""


@pytest.mark.sampled(every=4)
def test_several_threads_decode_the_first_message_of_a_kind() -> None:
    assert subprocess.run([sys.executable, "-c", FIRST], check=False).returncode == 0
