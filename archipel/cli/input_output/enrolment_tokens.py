"""The file of an enrolment token."""

from __future__ import annotations

from pathlib import Path

from archipel.errors import CommandError, MessageError
from archipel.protocol.identity import EnrolmentToken
from archipel.protocol.sealed import decode

MAX_TOKEN_BYTES = 64 << 10


def read_token(file: Path) -> EnrolmentToken:
    """The token in a file of `archipel token`. Raises CommandError, which names the file and the remedy."""
    try:
        with open(file, "rb") as opened:
            # One byte more than allowed shows that the file is larger, without reading all of it.
            content = opened.read(MAX_TOKEN_BYTES + 1)
        if len(content) > MAX_TOKEN_BYTES:
            raise MessageError(f"more than {MAX_TOKEN_BYTES} bytes")
        return decode("token", content, EnrolmentToken)
    except OSError as error:
        raise CommandError(
            f"{file}: cannot be read ({error.strerror}); give the path of a file that `archipel token` made"
        ) from None
    except MessageError as error:
        # The file may hold another secret, such as a private key, so the message does not show its content.
        raise CommandError(
            f"{file}: expected an enrolment token, got none or a damaged one ({error}); "
            "copy the file of `archipel token` again"
        ) from None
