"""Looks at a federation of docker/compose.yml that runs as plain processes, where all services have their names.

    python -m tests.support.compose_look FOLDER

Waits for two rounds of the root, and for those of the edge servers, then prints FOUND and what it saw as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from archipel.operator import OperatorClient

ROUNDS = 2
SECONDS = 300
SERVERS = {"server": ("trial", "sites"), "edge-1": ("site-1", "devices"), "edge-2": ("site-2", "devices")}
"""Each server's volume, and the population of those that enrol there."""
REACH = """
import json, socket, sys
found = []
for name, address in json.loads(sys.argv[1]).items():
    try:
        socket.create_connection((address, 8470), 3).close()
        found.append(name)
    except OSError:
        pass
print(json.dumps(found))
"""


def look(folder: Path) -> dict[str, Any]:
    clients = {
        server: OperatorClient(
            f"http://{server}:8470", (folder / "volumes" / volume / "operator" / "operator.token").read_text().strip(),
            allow_http=True,
        )
        for server, (volume, _) in SERVERS.items()
    }  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        # An edge server has its task with the first round of it.
        tasks = {server: list(client.tasks.list()) for server, client in clients.items()}
        if all(found and found[0].rounds_committed >= ROUNDS for found in tasks.values()):
            break
        time.sleep(1)
    seen: dict[str, Any] = {"metrics": {server: read_metrics(server, folder) for server in SERVERS}}
    for server, (_, population) in SERVERS.items():
        (task,) = tasks[server]
        rounds = list(clients[server].tasks.rounds(task.task_id))
        seen["root" if server == "server" else server] = {
            "task": task.task_id,
            "rounds": task.rounds_committed,
            "devices": [device.device_id for device in clients[server].devices.list(population=population)],
            "survivors": sorted({device for each in rounds for device in each.survivors}),
        }
    log = (folder / "volumes" / "trial" / "server" / "data" / "requests.log").read_text()
    callers = {json.loads(line)["device"] for line in log.splitlines()}
    seen["root"]["callers"] = sorted(callers - {None})
    seen["page"] = urllib.request.urlopen("http://server:8470/demo/").read().decode()[:15]
    seen["reached"] = {f"device-{number}": reached_by(f"device-{number}", folder) for number in range(1, 7)}
    return seen


def read_metrics(server: str, folder: Path) -> dict[str, Any]:
    """The names of what it measures, and the status without the token."""
    url, token = f"http://{server}:9464/metrics", (folder / "volumes" / "trial" / "metrics" / "token").read_text()
    try:
        urllib.request.urlopen(url)
        refused = 0
    except urllib.error.HTTPError as error:
        refused = error.code
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    lines = urllib.request.urlopen(asked).read().decode().splitlines()
    named = sorted({line.split("{")[0].split(" ")[0] for line in lines if line.startswith("archipel_")})
    return {"refused": refused, "named": named}


def reached_by(service: str, folder: Path) -> list[str]:
    """Which servers' addresses, in whatever network, take a connection from the service's own place."""
    addresses = {}
    for file in sorted((folder / "networks").glob("*.hosts")):
        for line in file.read_text().splitlines():
            address, name = line.split()
            if name in SERVERS:
                addresses[f"{name} {address}"] = address
    done = subprocess.run(
        ["nsenter", f"--net={folder / 'networks' / service}.net", sys.executable, "-c", REACH, json.dumps(addresses)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[str] = json.loads(done.stdout)
    return sorted({each.split()[0] for each in found})


if __name__ == "__main__":
    print("FOUND", json.dumps(look(Path(sys.argv[1]))))
