"""What errors of other libraries say, for the texts of archipel's own."""

from __future__ import annotations

import re

_LONGEST = 300
# Where in C++ an error comes from, and the name of a file that is gone when somebody reads it.
_NOISE = re.compile(
    r"\[ONNXRuntimeError\] : \d+ : \w+ : |Load model from \S+ failed:|Non-zero status code returned while |"
    r"Exception during (?:loading|initialization): |"
    r"/\S+\.(?:cc|h|cpp):\d+:? (?:\w+: |(?:[^()]*\([^()]*\))(?: const)?(?: \[with [^\]]*\])? ?)"
)


def one_line(error: object) -> str:
    """What a library says, for an error of archipel: one line of at most 300 characters, without its own source."""
    text = _NOISE.sub("", " ".join(str(error).split())).strip(" .")
    return text[:_LONGEST] or type(error).__name__
