"""How long it takes until a device is set aside that spoils secure rounds, what it costs, and whom it costs.

A device that sends random numbers cannot be seen in one round. The server draws lots for who is in the next ones and
counts (archipel.server.devices.suspicion, run here as the server runs it: the same draw, the same bets, the same risk).
For each setting: after how many rounds the last spoiler is set aside, the share of rounds that were spoiled until then,
how many spoilers were found at all, and in how many searches an honest device was set aside. "pair" spoils only the
rounds of one other device, to have that one set aside.

    python benchmarks/attacks/spoilers.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure import print_alone, state_run

from archipel.server.devices.suspicion import PATIENCE, Score, accused, bet, draw

RISK = 0.05
"""As the setting false_accusations is by default."""


@dataclass(frozen=True)
class Setting:
    """`fleet` devices that all wait, `cohort` in a round and `required` at least; `spoilers` of them spoil each round
    that they are in with probability `share`. `pair`: only if one other device is in it. `dropouts`: share of a round's
    devices that drop out of it before they send anything."""

    fleet: int
    cohort: int
    required: int
    spoilers: int = 1
    share: float = 1.0
    pair: bool = False
    dropouts: float = 0.0


@dataclass(frozen=True)
class Search:
    """What one search came to. `rounds` and `spoiled` until all spoilers were set aside, or the end."""

    rounds: int
    spoiled: int
    in_a_row: int
    found: int
    honest: int


@dataclass(frozen=True)
class Row:
    fleet: int
    cohort: int
    required: int
    spoilers: int
    share: float
    kind: str
    rounds_median: float
    rounds_90: float
    spoiled_median: float
    spoiled_share: float
    longest_row: int
    found: float
    honest_in: float
    honest_most: int
    searches: int


def search(setting: Setting, seed: int, most: int) -> Search:
    """One search, over `most` rounds at most."""
    random = Random(seed)
    waiting = [f"{number:04d}" for number in range(setting.fleet)]
    bad, victim = set(waiting[: setting.spoilers]), waiting[-1]
    left, scores, absent = set(bad), dict[str, Score](), Score()
    spoiled_rounds = honest = quiet = row = longest = 0
    for number in range(1, most + 1):
        known = scores if quiet < PATIENCE else {}
        made = draw(waiting, known, cohort=setting.cohort, required=setting.required, random=random)
        chosen, pool = set(made.chosen), set(made.suspects)
        sent = {device for device in chosen if device in bad or random.random() >= setting.dropouts}
        wants = victim in sent if setting.pair else True
        spoiled = any(wants and random.random() < setting.share for _ in bad & sent)
        spoiled_rounds += spoiled
        row = row + 1 if spoiled else 0
        longest = max(longest, row)
        quiet = 0 if spoiled else quiet + 1
        if spoiled:
            scores = dict.fromkeys(sent, absent) | scores
            most_likely = max(made.chance, made.suspect_chance)
            absent = bet(absent, chance=most_likely, present=False, spoiled=True)
        for device, score in scores.items():
            chance = made.suspect_chance if device in pool else made.chance
            if device in chosen:
                if device in sent or not spoiled:
                    scores[device] = bet(score, chance=chance, present=True, spoiled=spoiled)
            elif spoiled or device in pool:
                scores[device] = bet(score, chance=chance, present=False, spoiled=spoiled)
        for device in accused(scores, devices=setting.fleet, risk=RISK):
            del scores[device]
            waiting.remove(device)
            left.discard(device)
            honest += device not in bad
        if not left or len(waiting) < setting.required:
            return Search(number, spoiled_rounds, longest, setting.spoilers - len(left), honest)
    return Search(most, spoiled_rounds, longest, setting.spoilers - len(left), honest)


def measure(setting: Setting, searches: int, most: int, pool: ProcessPoolExecutor) -> Row:
    seeds = range(searches)
    found = list(pool.map(search, [setting] * searches, seeds, [most] * searches, chunksize=4))
    rounds = sorted(each.rounds for each in found)
    return Row(
        fleet=setting.fleet,
        cohort=setting.cohort,
        required=setting.required,
        spoilers=setting.spoilers,
        share=setting.share,
        kind="pair" if setting.pair else f"{setting.dropouts:.0%} drop out" if setting.dropouts else "",
        rounds_median=statistics.median(rounds),
        rounds_90=rounds[int(0.9 * len(rounds))],
        spoiled_median=statistics.median(each.spoiled for each in found),
        spoiled_share=sum(each.spoiled for each in found) / sum(rounds),
        longest_row=max(each.in_a_row for each in found),
        found=sum(each.found for each in found) / (setting.spoilers * searches),
        honest_in=sum(each.honest > 0 for each in found) / searches,
        honest_most=max(each.honest for each in found),
        searches=searches,
    )


def settings(quick: bool) -> Iterator[Setting]:
    for fleet, cohort, required in ((12, 12, 10), (30, 16, 10), (100, 16, 10), (1000, 16, 10)):
        for share in (1.0, 0.5, 0.3, 0.1):
            if not quick or (fleet <= 100 and share >= 0.3):
                yield Setting(fleet, cohort, required, share=share)
        if fleet > 12 and not quick:
            yield Setting(fleet, cohort, required, spoilers=3)
            yield Setting(fleet, cohort, required, spoilers=3, share=0.3)
    yield Setting(30, 16, 10, dropouts=0.2)
    yield Setting(30, 16, 10, pair=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings and searches: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object a row on standard output, nothing else")
    options = parser.parse_args()
    state_run(options.json, ("numpy",))
    searches, most = (40, 500) if options.quick else (100, 2000)
    if not options.json:
        print(
            "| fleet | round (least) | spoilers | spoil | rounds until found: median, 90 % | spoiled: median, share | ",
            end="",
        )
        print("most in a row | found | searches with an honest device set aside |")
        print("|---|---|---|---|---|---|---|---|---|")
    with ProcessPoolExecutor() as pool:
        for setting in settings(options.quick):
            row = measure(setting, searches, most, pool)
            if options.json:
                case = f"fleet {row.fleet}, {row.spoilers} spoil {row.share:.0%}{', ' if row.kind else ''}{row.kind}"
                print_alone(
                    "spoilers", case, rounds_until_found=row.rounds_median,
                    rounds_until_found_of_90_percent=row.rounds_90,
                    share_of_rounds_spoiled=row.spoiled_share, share_found=row.found,
                    share_of_searches_with_an_honest_device_set_aside=row.honest_in,
                )  # fmt: skip
            else:
                print(_line(row), flush=True)


def _line(row: Row) -> str:
    cells = (
        f"{row.fleet:,}",
        f"{row.cohort} ({row.required})",
        f"{row.spoilers}",
        f"{row.share:.0%} of their rounds" + (f"; {row.kind}" if row.kind else ""),
        f"{row.rounds_median:g}, {row.rounds_90:g}",
        f"{row.spoiled_median:g}, {row.spoiled_share:.0%}",
        f"{row.longest_row}",
        f"{row.found:.0%}",
        f"{row.honest_in:.1%} of {row.searches}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
