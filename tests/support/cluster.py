"""A PostgreSQL cluster of the tests' own: in a folder in memory, on a Unix socket, gone afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SUPERUSER = "archipel"


class Cluster:
    """`start`, `url(database)`, `stop`. As root it runs as the user postgres: PostgreSQL refuses to run as root."""

    def __init__(self) -> None:
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="archipel-postgres-", dir=memory if memory.is_dir() else None))
        self._as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._as_user:
            shutil.chown(self.folder, "postgres")

    def start(self) -> None:
        self._run("initdb", "-D", str(self.folder / "data"), "-U", SUPERUSER, "-A", "trust", "--no-sync", "-E", "UTF8")
        self.start_again()

    def crash(self) -> None:
        """As after a power cut: no connection is ended in order, and what was not synced is gone. Then it starts."""
        self.halt()
        self.start_again()

    def halt(self) -> None:
        """No connection is ended in order."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", "immediate", "stop")

    def start_again(self) -> None:
        # Durability is what the tests of killing want; the folder is in memory, so it costs nothing.
        settings = f"-k {self.folder} -c listen_addresses='' -c max_connections=200 -c fsync=on"
        self._run(
            "pg_ctl", "-D", str(self.folder / "data"), "-l", str(self.folder / "log"), "-w", "-o", settings, "start"
        )

    def stop(self) -> None:
        self.halt()
        shutil.rmtree(self.folder)

    def url(self, database: str) -> str:
        """For SQLAlchemy."""
        return f"postgresql://{SUPERUSER}@/{database}?host={self.folder}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as_user, find(program) or program, *arguments]
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program}: {done.stdout}")


def find(program: str) -> str | None:
    """The path of one of PostgreSQL's programs; Debian keeps them out of PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), key=lambda path: float(path.parts[4]))
    return shutil.which(program) or (str(versions[-1]) if versions else None)
