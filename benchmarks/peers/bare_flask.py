"""A Flask application that does nothing but stream a body to disk: the measure of a server like ours."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from flask import Flask, Response, request

CHUNK_BYTES = 256 << 10
FOLDER = Path(os.environ["BARE_FOLDER"])

app = Flask("bare")


@app.put("/update")
def update() -> Response:
    path = FOLDER / secrets.token_hex(16)
    with open(path, "xb", buffering=0) as file:
        while chunk := request.stream.read(CHUNK_BYTES):
            file.write(chunk)
        os.fsync(file.fileno())
    path.unlink()  # so that the disk does not fill up; ours keeps it
    return Response('{"stored":true}', mimetype="application/json")
