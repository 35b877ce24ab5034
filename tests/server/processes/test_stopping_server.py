"""What a server still does when it is told to stop."""

from __future__ import annotations

import sqlite3

import pytest

from archipel.errors import RefusedError
from archipel.operator import OperatorClient
from tests.support.serving import Server
from tests.support.world import DataFolder


def test_counts_of_the_last_minute_are_written(data_folder: DataFolder) -> None:
    server = Server(data_folder[0])
    with OperatorClient(server.start(), "wrong") as stranger:
        for _ in range(3):
            with pytest.raises(RefusedError, match="401"):
                next(stranger.tasks.list())
    assert server.stop() == 0
    with sqlite3.connect(f"file:{server.folder}/archipel.db?mode=ro", uri=True) as database:
        rows = database.execute("SELECT actor, action, detail FROM audit").fetchall()
    database.close()
    assert rows == [("server", "access.refused", '{"count": 3, "sources": 1, "address:127.0.0.1": 3}')]
