"""Bundles: the signed files that devices run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from archipel.errors import ClientError, RefusedError
from archipel.operator.connection import Resource, make_path
from archipel.protocol.messages import Pieces
from archipel.protocol.operator.tasks import BundleInfo, BundlePage


class Bundles(Resource):
    """`OperatorClient.bundles`. `digest` is a bundle's, 64 hexadecimal digits (`BundleInfo.digest`)."""

    def upload(self, path: Path | str, population: str | None = None) -> BundleInfo:
        """Send a .bundle file to the server. The same bundle again changes nothing, so this may be repeated.

        Route: POST /v1/bundles

        Args:
            path: the file, which the errors name.
            population: the one that the bundle is for; None: all that the token is for.

        Returns:
            The bundle's digest, name, size in bytes, and strategy.

        Raises:
            ClientError: the file cannot be read.
            RefusedError: 403: the token lacks the role operator, or is not for the population. 413: the file is
                larger than the server takes. 422: it is no bundle, or no key signed it that the server trusts.
        """
        path = Path(path)
        try:
            with open(path, "rb") as file:
                return self._connection.upload(
                    "/v1/bundles",
                    BundleInfo,
                    file,
                    size=path.stat().st_size,
                    media_type="application/zip",
                    population=population,
                )
        except OSError as error:
            raise ClientError(f"{path}: cannot be read ({error.strerror})") from None
        except RefusedError as error:
            raise RefusedError(
                error.status, error.kind, f"{path}: {error.message}", error.retry_after, error.request_id
            ) from None

    def list(self) -> Iterator[BundleInfo]:
        """Go through the bundles that the token's populations may read.

        Route: GET /v1/bundles

        Returns:
            The bundles, newest first, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages("/v1/bundles", BundlePage)

    def download(self, digest: str) -> bytes:
        """Fetch a .bundle file.

        Route: GET /v1/bundles/<digest>

        Args:
            digest: the bundle's digest, which is that of its manifest and not that of the file.

        Returns:
            The bytes of the file.

        Raises:
            RefusedError: 404: there is no such bundle for this token.
        """
        return self._connection.download(make_path("bundles", digest))

    def pieces(self, digest: str) -> Pieces:
        """Ask which parts of a .bundle file other files may have, too, so that nobody need fetch them again.

        Route: GET /v1/bundles/<digest>/pieces

        Args:
            digest: the bundle's digest.

        Returns:
            The size of the file in bytes, and where the parts are in it.

        Raises:
            RefusedError: 404: there is no such bundle for this token.
        """
        return self._connection.get(make_path("bundles", digest, "pieces"), Pieces)
