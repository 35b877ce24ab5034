"""Weights that rounds and versions name by their digest."""

from __future__ import annotations

import numpy as np

from archipel.bundle import read_weights
from archipel.operator.connection import Resource, make_path
from archipel.protocol.messages import Pieces


class Weights(Resource):
    """`OperatorClient.weights`. `digest` is the SHA-256 of the weights, 64 hexadecimal digits.

    It is what `TaskInfo.model`, `RoundInfo.weights_out` and `VersionInfo.weights` say.
    """

    def download(self, digest: str) -> bytes:
        """Fetch weights as they are stored.

        Route: GET /v1/blobs/<digest>

        Args:
            digest: the digest of the weights.

        Returns:
            The bytes of a safetensors file.

        Raises:
            RefusedError: 404: there are no such weights for this token. 410: the server has deleted them.
        """
        return self._connection.download(make_path("blobs", digest))

    def read(self, digest: str) -> dict[str, np.ndarray]:
        """Fetch weights as arrays.

        Calls: download

        Args:
            digest: the digest of the weights.

        Returns:
            The parameters by name, read-only, each with the dtype and the shape that the bundle's manifest says.

        Raises:
            RefusedError: 404: there are no such weights for this token. 410: the server has deleted them.
            TensorLayoutError: the server sent something else than a file of weights.
        """
        return read_weights(self.download(digest))

    def pieces(self, digest: str) -> Pieces:
        """Ask which parts of a file of weights other files may have, too, so that nobody need fetch them again.

        Route: GET /v1/blobs/<digest>/pieces

        Args:
            digest: the digest of the weights.

        Returns:
            The size of the file in bytes, and where the parts are in it.

        Raises:
            RefusedError: 404: there are no such weights for this token. 410: the server has deleted them.
        """
        return self._connection.get(make_path("blobs", digest, "pieces"), Pieces)
