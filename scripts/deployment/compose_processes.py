"""Bring up the services of docker/compose.yml as plain processes, where there is no container engine.

    python scripts/deployment/compose_processes.py FOLDER [-- COMMAND ...]

Each service runs the command that the file names, with its variables, as the user of its Dockerfile, and sees its
volumes and files at the paths named there and no others to write: it gets a root of its own, this machine's with a
layer over it. It is in the networks that the file names, with those alone that are in them, too; this machine shows the
ports that the file publishes. Each starts when what it waits for is healthy or done. FOLDER keeps the volumes and what
each service prints.

Programs come from this machine: archipel from this environment, PostgreSQL and Prometheus from the system. Debian has
neither MinIO nor Grafana: moto's server stands in for the former (its health check is a connection), and the latter is
left out; so is Prometheus where it is not installed. When all are up COMMAND runs where it reaches all of them by their
names, and its exit code is this one's; without one, Ctrl-C ends it. Needs root.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from compose_file import ROOT, Port, Service, dockerfile_says, read_compose
from compose_networks import Networks, forward, listen

HEALTHY_SECONDS = 180
STOP_SECONDS = 60
NOBODY = "65534:65534"
POSTGRES_PROGRAMS = "".join(f":{folder}" for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))
INSIDE = "ARCHIPEL_COMPOSE_SOCKETS"
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
    echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D "$PGDATA" postgres >/dev/null
fi
exec postgres -D "$PGDATA" -k /tmp -c listen_addresses='*'
"""
MOTO = ["-W", "ignore", "-m", "moto.server", "--host", "0.0.0.0", "--port", "9000"]


class Process:
    """A service's process, its layer and its log in `folder`. Raises ValueError where it cannot be started here."""

    def __init__(self, service: Service, folder: Path, networks: Networks) -> None:
        self.service = service
        self._networks = networks
        self.log = folder / "logs" / f"{service.name}.log"
        self._folder = folder
        self._layer = folder / "layers" / service.name
        self._image = program_of(service)
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
        enter = [
            *self._networks.enter(self.service), f"--mount=/proc/{self.started.pid}/ns/mnt",
            *self._inside(self._translate(check)),
        ]  # fmt: skip
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
                [*self._networks.enter(self.service), "unshare", "--mount", "--propagation", "private", "sh", "-c",
                 script, "sh", *self._inside(self._command())],
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
        """Lines of shell: the service's volumes and files, and the names of those that it may reach."""
        yield f'mount --bind {shlex.quote(str(self._networks.hosts(self.service)))} "$LAYER/root/etc/hosts"'
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
    try:
        services = read_compose()
        ports = [port for service in services.values() if not left_out(service) for port in service.ports]
        if INSIDE not in os.environ:
            begin_inside(ports)
        # Opened on the other side, in the order of the ports; -1 where it could not be.
        numbers = [int(number) for number in os.environ.pop(INSIDE).split()]
        waiting = {
            port: socket.socket(fileno=number) for port, number in zip(ports, numbers, strict=True) if number >= 0
        }
        return run(services, waiting, options.folder.absolute(), options.command)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"compose_processes.py: {error}", file=sys.stderr)
        return 1


def program_of(service: Service) -> str:
    """What its image is of."""
    return service.image.rpartition("/")[2].partition(":")[0]


def left_out(service: Service) -> bool:
    program = program_of(service)
    return program == "grafana" or (program == "prometheus" and shutil.which(program) is None)


def begin_inside(ports: Sequence[Port]) -> NoReturn:
    """Run this program again in networks and mounts of its own, with sockets that wait for the published ports here."""
    opened, refused = listen(ports)
    for line in refused:
        print(line, flush=True)
    os.environ[INSIDE] = " ".join(str(opened[port].fileno() if port in opened else -1) for port in ports)
    arguments = ["unshare", "--net", "--mount", "--propagation", "private", sys.executable, *sys.argv]
    os.execvp(arguments[0], arguments)


def run(
    services: dict[str, Service], waiting: Mapping[Port, socket.socket], folder: Path, command: Sequence[str]
) -> int:
    """Start them in order, run the command, and stop them in the other order.

    `waiting`: a socket of this machine for each port that it shows.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    for left in ("layers", "networks"):
        shutil.rmtree(folder / left, ignore_errors=True)
    networks = Networks(folder / "networks")
    networks.open(services.values())
    for port, opened in waiting.items():
        forward(opened, networks.address(port.service), port.inside)
    # For the command; services have roots of their own.
    subprocess.run(["mount", "--bind", networks.all_hosts(), "/etc/hosts"], check=True)
    running: dict[str, Process] = {}
    try:
        for service in services.values():
            if left_out(service):
                print(f"{service.name}: left out, there is no {program_of(service)} on this machine", flush=True)
                continue
            for other, condition in service.waits.items():
                wait(running[other], condition)
            running[service.name] = Process(service, folder, networks)
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


if __name__ == "__main__":
    sys.exit(main())
