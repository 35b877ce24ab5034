"""Secure rounds over neighbours beside Flower's SecAgg+: seconds of the server and of a client, and bytes of a client.

| row | what |
|---|---|
| server 100 x 10^6 | all that the server computes in a round of 100 clients with vectors of 10^6 entries of 16 bits |
| client 100 x 10^6 | all that one of its clients computes, from its first message to its last |
| client ..., messages | kB that one of its clients sends and receives beside its vector |
| expansion 2^10 x 2^20 | bytes that a client sends and receives, for each byte of 2^20 entries of 16 bits |

A tenth of the clients leaves after dealing, where it costs most: their masks have to be reconstructed. Packing and
unpacking messages is included; for entries of a masked vector that is whole bytes, in "expansion" as many bits as the
sum needs. What the clients do is in `secure/devices.py`: the server gets what real participants send, and the unmasked
sum is compared with the plain one. Sizes withstand a fifth of corrupt and a fifth of leaving clients, with a server
that keeps to the protocol, and in rows that say so with a malicious one. Rows with ML-KEM are of the protocol whose
keys resist quantum computers (docs/protocol-mlkem.md); Flower has none, so they are compared with nothing.

Flower has no default for its number of shares and its threshold, and its example is too small to be secure (3 shares),
so it gets ours with a server that keeps to the protocol: its SecAgg+ has no other. Up to 100 clients that is its real
workflow over its real mod, all in one process. With more it would take hours, so its server's time is added up from
what its own functions take for one secret, one mask and one vector ("from its parts"); a client of it is always real.
Flower's messages are not packed, in its favour. The peer of "expansion" is what Bonawitz et al. 2017 published.

Each side runs in a process of its own, one after the other. 10^4 clients with a malicious server have 570 neighbours
each and take devices half an hour, so that row is left out, and with 1000 clients it has vectors of 10^5 entries.

    python benchmarks/secure_aggregation.py --install-peers     once: an environment with Flower
    python benchmarks/secure_aggregation.py                     all rows, 3 runs of each side up to 100 clients, else 1
    python benchmarks/secure_aggregation.py --quick             50 clients, 10^4 entries, once
    python benchmarks/secure_aggregation.py --only "1000 x 10^6" --without-peer --profile FILE
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lite_peers import DEFAULT_FOLDER, PeerError, clean_environment, install, python_of
from measure import Report, Row, arguments, print_alone

from archipel.protocol.bits import packed_size
from archipel.protocol.messages import Protocol
from archipel.protocol.secagg_plus.sizes import Assumptions, choose_sizes

sys.path.append(str(Path(__file__).parent / "secure"))
from run_archipel import VALUE_BITS, sum_bits

HERE = Path(__file__).parent / "secure"
PEER, ENVIRONMENT = "Flower SecAgg+", "flower-secagg"
PACKAGES = ("flwr==1.42.0", "numpy")
PUBLISHED = 1.73
"""Expansion of 2^10 users with 2^20 entries of 16 bits (Bonawitz et al. 2017, section 1)."""
SEMI_HONEST, MALICIOUS = "semi-honest", "malicious"
MOST_IN_FULL = 100
"""Clients of a round that Flower runs in full."""


@dataclass(frozen=True)
class Case:
    """A round. `client` rows are not made where another case has them."""

    name: str
    clients: int
    entries: int
    server: str = SEMI_HONEST
    client: bool = True
    protocol: Protocol = "neighbours"

    def title(self, side: str) -> str:
        malicious, mlkem = self.server == MALICIOUS, self.protocol == "neighbours-mlkem"
        return f"{side} {self.name}" + ", malicious" * malicious + ", ML-KEM" * mlkem


CASES = (
    Case("100 x 10^6", 100, 10**6),
    Case("100 x 10^6", 100, 10**6, MALICIOUS),
    Case("100 x 10^6", 100, 10**6, protocol="neighbours-mlkem"),
    Case("100 x 10^6", 100, 10**6, MALICIOUS, protocol="neighbours-mlkem"),
    Case("1000 x 10^6", 1000, 10**6),
    Case("1000 x 10^5", 1000, 10**5, MALICIOUS),
    Case("1000 x 10^5", 1000, 10**5),
    Case("1000 x 10^5", 1000, 10**5, protocol="neighbours-mlkem"),
    Case("10000 x 10^5", 10000, 10**5, client=False),
)
QUICK = (
    Case("50 x 10^4", 50, 10**4),
    Case("50 x 10^4", 50, 10**4, MALICIOUS),
    Case("50 x 10^4", 50, 10**4, MALICIOUS, protocol="neighbours-mlkem"),
)
EXPANSION = "expansion"


def main() -> None:
    options = parsed()
    if options.install_peers:
        install(options.peers, ENVIRONMENT, PACKAGES)
        return
    report = Report(options.json, ("numpy", "cryptography", "msgspec"))
    for case in QUICK if options.quick else CASES:
        if options.only in (None, case.name):
            compare(case, options, report)
    if options.only in (None, EXPANSION):
        for server in (SEMI_HONEST, MALICIOUS):
            expand(7 if options.quick else 10, server, options, report)
        if not options.quick:
            expand(10, SEMI_HONEST, options, report, "neighbours-mlkem")


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", choices=[*dict.fromkeys(case.name for case in CASES), EXPANSION], help="rows of these"
    )
    parser.add_argument("--server", choices=(SEMI_HONEST, MALICIOUS), help="rows with this one")
    parser.add_argument("--runs", type=int, help="of each side (3 up to 100 clients, else 1)")
    parser.add_argument("--without-peer", action="store_true", help="measure archipel alone")
    parser.add_argument(
        "--profile", default="", metavar="FILE", help="where the server's time goes, once for each case"
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="of all threads of a side, for a machine that others use too"
    )
    parser.add_argument("--peers", type=Path, default=DEFAULT_FOLDER, help="folder of the peer's environment")
    parser.add_argument("--install-peers", action="store_true")
    return parser.parse_args()


def compare(case: Case, options: argparse.Namespace, report: Report) -> None:
    """The rows of a case: both sides in turn, run after run."""
    if options.server not in (None, case.server):
        return
    small = case.clients <= MOST_IN_FULL
    runs = 1 if options.quick else options.runs or (3 if small else 1)
    compared = case.protocol == "neighbours" and not options.without_peer
    peer = flower(case, options) if compared else None
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(runs):
        # What the sides' processes start with is nothing of the other: each has ended before the next begins.
        ours.append(run_archipel(case, options))
        if peer is not None:
            theirs.append(peer())
    for side in ("server", "client") if case.client else ("server",):
        name = side + "_processor" * options.processor_time
        found = [run[name] for run in ours]
        if theirs:
            others, ratios = [run[name] for run in theirs], [a[name] / b[name] for a, b in zip(ours, theirs)]
            parts = ", from its parts" * (side == "server" and not small)
            median, other, ratio = (statistics.median(values) for values in (found, others, ratios))
            report.add([Row("secure_aggregation", case.title(side), median, other, PEER + parts, ratio, "s")])
        else:
            alone(case.title(side), options, s=statistics.median(found))
    if case.client:
        alone(f"{case.title('client')}, messages", options, kB=statistics.median(run["bytes"] for run in ours) / 1e3)
    alone(f"{case.title('server')}, memory", options, MB=max(run["memory"] for run in ours))


def flower(case: Case, options: argparse.Namespace) -> Callable[[], dict[str, float]] | None:
    """What runs Flower's side of a case; None where it is not installed, with a line that says why."""
    try:
        command = [str(python_of(options.peers, ENVIRONMENT, "benchmarks/secure_aggregation.py"))]
    except PeerError as error:
        print(f"without {PEER}: {error}", file=sys.stderr)
        return None
    sizes = choose_sizes(case.clients, Assumptions(corrupt=0.2, dropped=0.2, server=SEMI_HONEST))
    # Its number of shares is odd, and one of them is the client's own.
    given = {"entries": case.entries, "shares": sizes.neighbours // 2 * 2 + 1, "threshold": sizes.threshold}

    def run() -> dict[str, float]:
        def ask(do: str, **more: int) -> dict[str, Any]:
            return run_side(command, "run_flower.py", {"do": do, **given, **more}, clean_environment())

        client = ask("client") if case.client else {}
        if case.clients <= MOST_IN_FULL:
            return client | ask("round", clients=case.clients)
        parts = ask("parts", shown=given["shares"] * 9 // 10)
        return client | {
            f"server{ending}": add_parts({name: part[clock] for name, part in parts.items()}, case, given["shares"])
            for ending, clock in (("", "seconds"), ("_processor", "processor"))
        }

    return run


def add_parts(parts: dict[str, float], case: Case, shares: int) -> float:
    """Of Flower's workflow: a secret of each client, a mask of each that stays, and every pair's of those that left."""
    leaving = -(-case.clients // 10)
    staying = case.clients - leaving
    own = parts["seed"] + parts["mask"] + parts["vector"]
    return staying * own + leaving * (parts["key"] + (shares - 1) * parts["pair"])


def expand(
    power: int, server: str, options: argparse.Namespace, report: Report, protocol: Protocol = "neighbours"
) -> None:
    """The row of bytes. Messages do not depend on the vector, so the round has a short one."""
    if options.server not in (None, server):
        return
    case, entries = Case(f"2^{power} x 2^20", 1 << power, 64, server, protocol=protocol), 1 << 20
    measured = run_archipel(case, options)
    plain, masked = packed_size(entries, VALUE_BITS), packed_size(entries, sum_bits(case.clients))
    ours = (masked + measured["bytes"]) / plain
    print(f"{case.title(EXPANSION)}: a vector of {masked} bytes, messages {measured['bytes']:.0f}", file=sys.stderr)
    name = "Bonawitz et al. 2017, published"
    if power == 10:
        report.add([Row("secure_aggregation", case.title(EXPANSION), ours, PUBLISHED, name, ours / PUBLISHED, "x")])
    else:
        alone(case.title(EXPANSION), options, x=ours)


def run_archipel(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    given = {"clients": case.clients, "entries": case.entries, "server": case.server, "protocol": case.protocol}
    given["every_mask"] = case.clients <= MOST_IN_FULL and case.entries <= 10**5
    if options.profile:
        given["profile"] = f"{options.profile}-{case.clients}-{case.server}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    found = run_side([sys.executable], "run_archipel.py", given, environment)
    steps = ", ".join(
        f"{step} {seconds:.3f} ({found['steps_processor'][step]:.3f})" for step, seconds in found["steps"].items()
    )
    print(f"{case.title('server')}: {found['sizes']}; {steps} s (of the processor)", file=sys.stderr)
    return found


def run_side(command: list[str], script: str, given: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """What a side prints last. Raises PeerError where it fails."""
    done = subprocess.run(
        [*command, str(HERE / script), json.dumps(given)], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise PeerError(f"{script} ended with {done.returncode}: {' '.join(done.stderr.split())[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def alone(case: str, options: argparse.Namespace, **measured: float) -> None:
    """A row that is compared with nothing."""
    if options.json:
        print_alone("secure_aggregation", case, **measured)
        return
    for unit, ours in measured.items():
        print(f"{case:<28}{ours:>10.3f}{'':>18}  {unit}", flush=True)


if __name__ == "__main__":
    main()
