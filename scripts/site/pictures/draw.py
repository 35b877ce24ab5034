"""Draw the pictures of the documentation that are made by a program.

    python scripts/site/pictures/draw.py

writes docs/pictures/*.svg; a test fails where they are not what this script draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from drawing import Drawing

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "pictures"


def platform() -> Drawing:
    """Cloud, server and devices, and what travels between them."""
    made = Drawing(
        880, 330, "The publisher trains, compresses and signs a bundle. The server hands it to devices, adds up their "
        "masked updates, and gives back new weights.",
    )  # fmt: skip
    made.frame(10, 10, 240, 250, "cloud: the publisher")
    made.box(30, 45, 200, 58, "train", "your PyTorch model", kind="cloud")
    made.box(30, 180, 200, 62, "compress, convert", "and sign: one bundle", kind="cloud")
    made.arrow((130, 103), (130, 180))
    made.frame(340, 10, 200, 250, "cloud or edge: the operator")
    made.box(360, 95, 160, 84, "server", "plans rounds,", "adds up what it", "cannot read", kind="server")
    made.frame(640, 10, 230, 250, "devices: their owners")
    for number, (name, what) in enumerate((("phone", "predicts, learns"), ("gateway", "the same bundle"),
                                           ("browser", "examples stay here"))):  # fmt: skip
        made.box(660, 42 + 72 * number, 190, 56, name, what, kind="device")
    made.arrow((230, 211), (295, 211), (295, 160), (360, 160))
    made.text(295, 280, "signed bundle: graphs, weights,", kind="soft")
    made.text(295, 297, "privacy policy", kind="soft")
    made.line((295, 266), (295, 215), dashed=True)
    made.arrow((520, 120), (640, 120), words="plans, weights")
    made.arrow((640, 160), (520, 160), words="masked updates", below=True)
    made.arrow((360, 115), (295, 115), (295, 74), (230, 74))
    made.text(296, 94, "new versions", kind="soft")
    return made


def rooms() -> Drawing:
    """The packages in the layers that import rules check."""
    rows: list[list[tuple[str, str]]] = [
        [("cli", "shared")],
        [("insight", "cloud")],
        [("simulation", "cloud")],
        [("converter", "cloud")],
        [("compression", "cloud")],
        [("training", "cloud"), ("models", "cloud")],
        [("autodiff", "cloud"), ("frontend", "cloud"), ("preprocessing", "cloud")],
        [("graph", "cloud")],
        [("edge", "server")],
        [("server", "server"), ("client", "device")],
        [("operator", "shared")],
        [("privacy", "shared")],
        [("strategies", "shared")],
        [("lite_runtime", "device"), ("protocol", "shared"), ("datasets", "shared")],
        [("bundle", "shared")],
        [("durable, errors, settings", "shared")],
    ]
    made = Drawing(
        760, 44 * len(rows) + 70, "The packages in layers: a package may import packages of lower rows, and none of "
        "higher rows. Those that run on devices are lite_runtime and client.",
    )  # fmt: skip
    for number, row in enumerate(rows):
        width = (560 - 12 * (len(row) - 1)) / len(row)
        for place, (name, kind) in enumerate(row):
            made.box(20 + place * (width + 12), 14 + 44 * number, width, 34, name, kind=kind)
    end = 14 + 44 * len(rows)
    made.arrow((620, 20), (620, end - 14))
    for number, words in enumerate(("may import", "what is below")):
        made.text(640, end / 2 + LINE_BELOW * number, words, kind="soft", anchor="start")
    legend = (
        ("cloud", "makes and trains graphs"),
        ("server", "server"),
        ("device", "device"),
        ("shared", "everywhere"),
    )
    for (kind, words), x in zip(legend, (20, 220, 320, 420)):
        made.box(x, end + 12, 18, 18, kind=kind)
        made.text(x + 26, end + 26, words, kind="soft", anchor="start")
    return made


LINE_BELOW = 18
MESSAGES = (
    # phase, from, to, words: "D" device, "S" server, "P" its peers
    ("", "D", "S", "check-in"),
    ("assigning", "S", "D", "signed plan"),
    ("", "D", "", "fetch bundle and weights, train"),
    ("advertising", "D", "S", "signed keys"),
    ("", "S", "D", "the cohort's keys"),
    ("sharing", "D", "S", "sealed shares of its secrets, one for each peer"),
    ("", "S", "P", "each envelope to its recipient"),
    ("complaining", "D", "S", "complaints about envelopes that do not open"),
    ("masking", "D", "S", "masked update"),
    ("confirming", "S", "D", "the survivors"),
    ("", "D", "S", "signed confirmation"),
    ("unmasking", "D", "S", "shares that unmask the sum"),
    ("aggregating", "", "S", "unmask the sum, take the server's step"),
    ("committed", "", "S", "new weights: the next version"),
)


def secure_round() -> Drawing:
    """The messages of a secure round."""
    made = Drawing(
        880, 44 * len(MESSAGES) + 80, "A secure round: a device checks in, gets a plan, trains, shares keys with "
        "its peers through the server, uploads a masked update, and helps to unmask the sum of those that stayed.",
    )  # fmt: skip
    places = {"D": 200.0, "S": 560.0, "P": 790.0}
    bottom = 44 * len(MESSAGES) + 70
    for name, words, kind in (("D", "device", "device"), ("S", "server", "server"), ("P", "its peers", "device")):
        made.box(places[name] - 60, 10, 120, 34, words, kind=kind)
        made.line((places[name], 44), (places[name], bottom), dashed=True)
    for number, (phase, sender, to, words) in enumerate(MESSAGES):
        y = 84 + 44 * number
        if phase:
            made.text(14, y, phase, kind="title", anchor="start")
            made.line((14, y - 25), (866, y - 25), dashed=True)
        if sender and to:
            made.arrow((places[sender], y), (places[to], y), words=words)
        else:
            at = places[sender or to]
            made.box(at - 150, y - 17, 300, 28, words, kind="paper")
    return made


def round_states() -> Drawing:
    """The phases of a round."""
    made = Drawing(
        860, 300, "Phases of a round. Secure: assigning, advertising, sharing, complaining, masking, confirming, "
        "unmasking, aggregating, committed. Plain: assigning, updating, aggregating. Asynchronous: buffering.",
    )  # fmt: skip
    top = ("advertising", "sharing", "complaining", "masking", "confirming", "unmasking")
    made.box(10, 110, 100, 40, "assigning", kind="server")
    for number, name in enumerate(top):
        made.box(20 + 138 * number, 20, 118, 40, name, kind="device")
        if number:
            made.arrow((138 * number, 40), (20 + 138 * number, 40))
    made.arrow((60, 110), (60, 60))
    made.text(72, 90, "secure", kind="soft", anchor="start")
    made.box(230, 110, 118, 40, "updating", kind="device")
    made.arrow((110, 130), (230, 130), words="plain")
    made.box(230, 180, 118, 40, "buffering", kind="device")
    made.arrow((110, 200), (230, 200), words="asynchronous")
    made.box(500, 110, 118, 40, "aggregating", kind="server")
    made.arrow((348, 130), (500, 130))
    made.arrow((348, 200), (440, 200), (440, 140), (500, 140))
    made.arrow((769, 60), (769, 85), (580, 85), (580, 110))
    made.box(710, 110, 118, 40, "committed", kind="shared")
    made.arrow((618, 130), (710, 130))
    made.box(500, 240, 118, 40, "failed", kind="paper")
    made.text(490, 256, "from any phase: too few answers at", kind="soft", anchor="end")
    made.text(490, 274, "its deadline, or a check that fails", kind="soft", anchor="end")
    made.arrow((559, 150), (559, 240), dashed=True)
    return made


def rollout_states() -> Drawing:
    """The states of a rollout."""
    made = Drawing(
        760, 250, "A rollout soaks and is evaluated stage by stage. After the last it is completed, without a good "
        "result in time it is rolled back, and an operator may pause and resume it.",
    )  # fmt: skip
    made.box(20, 30, 130, 44, "soaking", kind="device")
    made.box(310, 30, 130, 44, "evaluating", kind="server")
    made.box(600, 30, 140, 44, "completed", "promoted", kind="shared")
    made.arrow((150, 42), (310, 42), words="soaked")
    made.arrow((310, 62), (150, 62), words="next stage", below=True)
    made.arrow((440, 52), (600, 52), words="last stage")
    made.box(165, 170, 130, 44, "paused", kind="paper")
    made.box(600, 170, 140, 44, "rolled back", kind="paper")
    made.arrow((85, 74), (85, 192), (165, 192), dashed=True)
    made.arrow((340, 74), (340, 192), (295, 192), dashed=True)
    made.text(210, 152, "an operator pauses and resumes", kind="soft")
    made.arrow((410, 74), (410, 180), (600, 180))
    made.text(505, 172, "no good result in time", kind="soft")
    made.arrow((230, 214), (230, 236), (670, 236), (670, 214))
    made.text(450, 229, "deadline of the pause", kind="soft")
    return made


PICTURES = {
    "platform": platform, "rooms": rooms, "secure-round": secure_round, "round-states": round_states,
    "rollout-states": rollout_states,
}  # fmt: skip


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(name), encoding="utf-8")
        print(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
