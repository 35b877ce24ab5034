"""Bring up the services of docker/compose.yml as plain processes, where there is no container engine.

    python scripts/deployment/compose_processes.py FOLDER [-- COMMAND ...]

Each service runs the command that the file names, with its variables, as the user of its Dockerfile, and sees its
volumes and files at the paths named there and no others to write: it gets a root of its own, this machine's with a
layer over it. All are in one network of their own, in which each service's name leads to it, and each starts when what
it waits for is healthy or done. FOLDER keeps the volumes and what each service prints.

Programs come from this machine: archipel from this environment, PostgreSQL and Prometheus from the system. Debian has
neither MinIO nor Grafana: moto's server stands in for the former (its health check is a connection), and the latter is
left out; so is Prometheus where it is not installed. When all are up COMMAND runs in the same network, and its exit
code is this one's; without one, Ctrl-C ends it. Needs root.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pwd
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from compose_file import ROOT, Service, dockerfile_says, read_compose

HEALTHY_SECONDS = 180
STOP_SECONDS = 60
NOBODY = "65534:65534"
POSTGRES_PROGRAMS = "".join(f":{folder}" for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
INSIDE = "ARCHIPEL_COMPOSE_NETWORK"
START = """
set -e
mount -t overlay overlay -o lowerdir=/,upperdir="$LAYER/upper",workdir="$LAYER/work" "$LAYER/root"
mount --rbind /proc "$LAYER/root/proc"
mount --rbind /sys "$LAYER/root/sys"
mount --rbind /dev "$LAYER/root/dev"
mount -t tmpfs tmpfs "$LAYER/root/tmp"
{mounts}
{sealed}
exec "$@"
"""
POSTGRES = """
set -e
export PGDATA=/var/lib/postgresql/data/cluster
if [ ! -e "$PGDATA/PG_VERSION" ]; then
    printf %s "$POSTGRES_PASSWORD" >/tmp/password
    initdb --username "$POSTGRES_USER" --pwfile /tmp/password --auth scram-sha-256 --encoding UTF8 >/dev/null
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D "$PGDATA" postgres >/dev/null
fi
exec postgres -D "$PGDATA" -k /tmp -c listen_addresses='*'
"""
MOTO = ["-W", "ignore", "-m", "moto.server", "--host", "0.0.0.0", "--port", "9000"]


class Process:
    """A service's process, its layer and its log in `folder`. Raises ValueError where it cannot be started here."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.log = folder / "logs" / f"{service.name}.log"
        self._folder = folder
        self._layer = folder / "layers" / service.name
        self._image = service.image.rpartition("/")[2].partition(":")[0]
        for name in ("upper", "work", "root"):
            (self._layer / name).mkdir(parents=True, exist_ok=True)
        self._user, self._group = self._owner()
        self.started = self._start()

    def healthy(self) -> bool:
        """What the health check says, in the process's own view of the files; without one, whether it runs."""
        check = self.service.check
        if self._image == "minio":
            check = [sys.executable, "-c", "import socket; socket.create_connection(('127.0.0.1', 9000), 2)"]
        if check is None:
            return self.started.poll() is None
        enter = ["nsenter", "--mount", "--target", str(self.started.pid), *self._inside(self._translate(check))]
        with self.log.with_suffix(".check").open("wb") as out:
            return subprocess.run(enter, stdout=out, stderr=subprocess.STDOUT, check=False).returncode == 0

    def _command(self) -> list[str]:
        given = self.service
        if self._image == "postgres":
            return ["sh", "-c", POSTGRES]
        if self._image == "minio":
            return [sys.executable, *MOTO]
        if self._image == "prometheus":
            return ["prometheus", *(given.command or ())]
        begin = given.entrypoint or dockerfile_says(given.dockerfile, "ENTRYPOINT")
        return self._translate([*begin, *(given.command or dockerfile_says(given.dockerfile, "CMD"))])

    @staticmethod
    def _translate(command: Sequence[str]) -> list[str]:
        """The image's Python is this one."""
        return [sys.executable if word == "python3" else word for word in command]

    def _owner(self) -> tuple[int, int]:
        """User and group of the image's Dockerfile; PostgreSQL's where it is that, and nobody elsewhere."""
        if self._image == "postgres":
            known = pwd.getpwnam("postgres")
            return known.pw_uid, known.pw_gid
        given = dockerfile_says(self.service.dockerfile, "USER") if self.service.dockerfile else NOBODY
        user, _, group = given.partition(":")
        return int(user), int(group)

    def _start(self) -> subprocess.Popen[bytes]:
        script = START.format(
            mounts="\n".join([*self._openings(), *self._mounts()]),
            sealed='mount -o remount,ro "$LAYER/root"' if self.service.read_only else "",
        )
        with self.log.open("ab") as out:
            return subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh",
                 *self._inside(self._command())],
                env=os.environ | {"LAYER": str(self._layer)}, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _inside(self, command: Sequence[str]) -> list[str]:
        """The command as the service's user, in the service's root, with its variables and no privileges."""
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin{POSTGRES_PROGRAMS}",
            "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp",
        } | dict(self.service.variables)  # fmt: skip
        return [
            "chroot", str(self._layer / "root"), "/usr/bin/env", "--ignore-environment",
            *(f"{name}={value}" for name, value in variables.items()),
            "setpriv", f"--reuid={self._user}", f"--regid={self._group}", "--clear-groups", "--no-new-privs",
            "--bounding-set=-all", "--inh-caps=-all", *command,
        ]  # fmt: skip

    def _openings(self) -> Iterator[str]:
        """Lines of shell: where this environment lies, another user may not look into; in the layer it may."""
        for place in (Path(sys.executable), Path(sys.base_prefix), ROOT):
            for parent in (place.resolve(), *place.resolve().parents, *place.parents):
                if parent.is_dir() and not parent.stat().st_mode & 0o001:
                    yield f'chmod o+x "$LAYER/root"{shlex.quote(str(parent))}'
            if Path("/tmp") in place.parents:
                # Under the empty /tmp of the service.
                folder = shlex.quote(str(place if place.is_dir() else place.parents[1]))
                yield f'mkdir -p "$LAYER/root"{folder} && mount --rbind {folder} "$LAYER/root"{folder}'

    def _mounts(self) -> Iterator[str]:
        """Lines of shell: the service's volumes and files, and the names of all services."""
        yield f'mount --bind {shlex.quote(str(self._folder / "hosts"))} "$LAYER/root/etc/hosts"'
        for number, mount in enumerate(self.service.mounts):
            inside = f'"$LAYER/root"{shlex.quote(mount.inside)}'
            if mount.volume:
                outside = self._folder / "volumes" / mount.volume / mount.subpath
                if not outside.exists():
                    if mount.subpath:
                        raise ValueError(f"{self.service.name}: {mount.volume} has no folder {mount.subpath}")
                    outside.mkdir(parents=True)
                    os.chown(outside, self._user, self._group)
                yield f"mkdir -p {inside}"
            else:
                outside = self._layer / f"file-{number}"
                outside.write_text(mount.content, encoding="utf-8")
                yield f'mkdir -p "$(dirname {inside})" && touch {inside}'
            yield f"mount --bind {shlex.quote(str(outside))} {inside}"
            if mount.read_only:
                yield f"mount -o remount,bind,ro {inside}"

    def stop(self) -> None:
        if self.started.poll() is None:
            self.started.send_signal(signal.SIGINT if self._image == "postgres" else signal.SIGTERM)
            try:
                self.started.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.started.kill()
                self.started.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("command", nargs="*", help="what runs when all services are up")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("compose_processes.py: mounts and networks of its own need root", file=sys.stderr)
        return 1
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "true"
        arguments = ["unshare", "--net", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvp(arguments[0], arguments)
    try:
        return run(read_compose(), options.folder.absolute(), options.command)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"compose_processes.py: {error}", file=sys.stderr)
        return 1


def run(services: dict[str, Service], folder: Path, command: Sequence[str]) -> int:
    """Start them in order, run the command, and stop them in the other order."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise_loopback()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "layers", ignore_errors=True)
    names = " ".join(services)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {names}\n", encoding="utf-8")
    # For the command; services have roots of their own.
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)
    running: dict[str, Process] = {}
    try:
        for service in services.values():
            program = service.image.rpartition("/")[2].partition(":")[0]
            if program == "grafana" or (program == "prometheus" and shutil.which(program) is None):
                print(f"{service.name}: left out, there is no {program} on this machine", flush=True)
                continue
            for other, condition in service.waits.items():
                wait(running[other], condition)
            running[service.name] = Process(service, folder)
            print(f"{service.name}: started", flush=True)
        for process in running.values():
            if process.service.check is not None:
                wait(process, "service_healthy")
        if command:
            return subprocess.run(command, check=False).returncode
        signal.pause()
        return 0
    except KeyboardInterrupt:
        return 0
    finally:
        for process in reversed(running.values()):
            process.stop()


def wait(process: Process, condition: str) -> None:
    """Raises ValueError where it does not become so."""
    deadline = time.monotonic() + HEALTHY_SECONDS
    done = condition == "service_completed_successfully"
    while time.monotonic() < deadline:
        code = process.started.poll()
        if done and code == 0:
            return
        if code is not None:
            last = process.log.read_text(errors="replace")[-2000:]
            raise ValueError(f"{process.service.name}: ended with {code}:\n{last}")
        if not done and process.healthy():
            return
        time.sleep(0.5)
    raise ValueError(f"{process.service.name}: not {condition} in {HEALTHY_SECONDS} s; see {process.log}")


def raise_loopback() -> None:
    """A new network has nothing but a loopback device that is down."""
    up, get, put = 0x1, 0x8913, 0x8914
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        request = struct.pack("16sh22x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(handle, get, request))
        fcntl.ioctl(handle, put, struct.pack("16sh22x", b"lo", flags | up))


if __name__ == "__main__":
    sys.exit(main())
