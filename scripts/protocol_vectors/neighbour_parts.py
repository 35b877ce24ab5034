"""The parts of a round over neighbours alone: sizes, shares, draws and trees, where a round shows too few cases."""

from __future__ import annotations

from itertools import product
from typing import Literal

from archipel.protocol.secagg_plus import sizes as s
from archipel.protocol.secagg_plus.drawing import draw_neighbours
from archipel.protocol.secagg_plus.shares import commit, split
from archipel.protocol.secagg_plus.tree import MemberTree, hash_member
from protocol_vectors.inputs import Json, Stream, fixed


def neighbour_parts() -> Json:
    return {"sizes": _sizes(), "shares": _shares(), "draws": _draws(), "trees": _trees()}


def _sizes() -> list[Json]:
    """The lowest threshold and the fewest partners of a device with so many neighbours, null where all are too few."""
    cases = []
    servers: tuple[Literal["malicious", "semi-honest"], ...] = ("malicious", "semi-honest")
    shares = ((0.0, 0.0), (0.2, 0.2), (1 / 3, 0.2), (0.1, 0.45), (0.999, 0.0))
    for cohort, server, (corrupt, dropped) in product((3, 10, 100, 257, 1000, 4096), servers, shares):
        assumed = s.Assumptions(corrupt, dropped, server, hidden=4)
        for neighbours in sorted({1, 2, 9, cohort // 4, cohort // 2, cohort - 1} & set(range(1, cohort))):
            low, _ = s._thresholds(cohort, neighbours, assumed)
            cases.append({
                "cohort": cohort, "server": server, "corrupt": corrupt, "dropped": dropped, "hidden": 4,
                "neighbours": neighbours, "low": low, "partners": s._partners(cohort, neighbours, assumed),
            })  # fmt: skip
    return cases


def _shares() -> list[Json]:
    cases = []
    # Twice 2^31 - 1, which is no element, and is drawn again.
    again = b"\xff\xff\xff\x7f" + fixed("coefficients", 28) + b"\xff\xff\xff\xff" + fixed("more", 36)
    for name, secret, threshold, holders, randomness in (
        ("one_holder", fixed("secret"), 1, 1, b""),
        ("the_largest_secret", b"\xff" * 32, 2, 3, fixed("largest", 36)),
        ("drawn_again", fixed("another secret"), 2, 4, again + fixed("again", 8)),
        ("many", fixed("a third secret"), 40, 60, b""),
    ):
        stream = Stream(f"shares {name}")
        drawn = iter([randomness[:36], randomness[36:44]]) if randomness else None
        shares = split(secret, threshold, holders, lambda count: next(drawn) if drawn else stream(count))  # noqa: B023
        used = randomness[: 36 + 8 * (name == "drawn_again")] if randomness else fixed(stream.name, stream.drawn)
        cases.append({
            "name": name, "secret": secret.hex(), "threshold": threshold, "holders": holders, "randomness": used.hex(),
            "shares": [share.hex() for share in shares], "associated": fixed("associated", 20).hex(),
            "commitments": [commit(7, x, share, fixed("associated", 20)).hex() for x, share in enumerate(shares, 1)],
        })  # fmt: skip
    return cases


def _draws() -> list[Json]:
    cases = []
    for size, own, count in ((3, 0, 2), (3, 2, 5), (10, 4, 8), (1000, 999, 300)):
        stream = Stream(f"draw {size}")
        places = draw_neighbours(size, own, count, stream)
        drawn = fixed(stream.name, stream.drawn)
        cases.append({"size": size, "own": own, "count": count, "randomness": drawn.hex(), "places": places})
    # 2^32 modulo 6 is 4, so numbers below 4 are drawn again.
    again = b"".join(number.to_bytes(4, "big") for number in (3, 0, 4, 2**32 - 1))
    parts = iter([again[at : at + 4] for at in range(0, 16, 4)])
    places = draw_neighbours(7, 3, 2, lambda count: next(parts))
    return [*cases, {"size": 7, "own": 3, "count": 2, "randomness": again.hex(), "places": places}]


def _trees() -> list[Json]:
    cases = []
    for size, shown in ((3, [0]), (3, [2, 0]), (4, [0, 1, 2, 3]), (9, [8, 3, 0]), (100, [*range(0, 100, 7)])):
        members = [fixed(f"member {place}", 40) for place in range(size)]
        tree = MemberTree([hash_member(member) for member in members])
        cases.append({
            "size": size, "root": tree.root.hex(), "places": shown, "proof": tree.prove(shown).hex(),
            "members": [members[place].hex() for place in shown],
        })  # fmt: skip
    return cases
