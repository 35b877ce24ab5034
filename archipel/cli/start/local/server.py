"""The server of a local federation: `python -m archipel.cli.start.local.server DATA_FOLDER PARENT PORT`.

It is like `archipel serve start`, but it ends when process PARENT does.
"""

from __future__ import annotations

import sys

from archipel.cli.main import fail
from archipel.errors import ArchipelError
from archipel.server import load_settings, supervise
from archipel.server.processes.parent import end_with_parent


def main(folder: str, parent: int, port: int) -> None:
    end_with_parent(parent)
    try:
        supervise(load_settings(folder, port=port), announce=lambda line: print(line, flush=True))
    except ArchipelError as error:
        fail(str(error))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
