"""Models and their versions, which the devices of a population run."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource, make_path
from archipel.protocol.operator.registry import (
    ModelInfo,
    ModelPage,
    ModelRequest,
    PromotionInfo,
    PromotionPage,
    PromotionRequest,
    RejectionRequest,
    RetentionRequest,
    VersionDetail,
    VersionInfo,
    VersionPage,
    VersionRequest,
)


class Models(Resource):
    """`OperatorClient.models`. In all methods `name` is a model's name, `number` the number of one of its versions."""

    def create(self, name: str, population: str) -> ModelInfo:
        """Make a model. Where the population has one of this name already, return that.

        Route: POST /v1/models

        Args:
            name: the model's name, which no other model of the server has.
            population: the one whose devices are to run the model.

        Returns:
            The model, at first without versions.

        Raises:
            RefusedError: 403: the token lacks the role operator, or is not for the population. 409: another
                population's model has this name. 422: the population has as many models as one may have.
        """
        return self._connection.post("/v1/models", ModelInfo, ModelRequest(name=name, population=population))

    def list(self) -> Iterator[ModelInfo]:
        """Go through the models of the token's populations.

        Route: GET /v1/models

        Returns:
            The models by name, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages("/v1/models", ModelPage)

    def get(self, name: str) -> ModelInfo:
        """Look at one model.

        Route: GET /v1/models/<name>

        Args:
            name: the model's name.

        Returns:
            Which version is promoted, which is the newest, and which rollout is under way.

        Raises:
            RefusedError: 404: there is no such model for this token.
        """
        return self._connection.get(make_path("models", name), ModelInfo)

    def register(self, name: str, request: VersionRequest) -> VersionInfo:
        """Register a bundle, or the result of a training task, as a version. Registered content keeps its version.

        Route: POST /v1/models/<name>/versions

        Args:
            name: the model's name.
            request: the bundle or the task that the version is made of.

        Returns:
            The version, with its number.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model for this token. 422: the
                bundle, the task or its version is not there, or the bundle has expired or is for other populations.
        """
        return self._connection.post(make_path("models", name, "versions"), VersionInfo, request)

    def versions(self, name: str) -> Iterator[VersionInfo]:
        """Go through the versions of a model.

        Route: GET /v1/models/<name>/versions

        Args:
            name: the model's name.

        Returns:
            The versions, newest first, fetched as they are reached.

        Raises:
            RefusedError: 404: there is no such model for this token; at the first item.
        """
        return self._connection.pages(make_path("models", name, "versions"), VersionPage)

    def version(self, name: str, number: int) -> VersionDetail:
        """Look at one version, with what devices found when they evaluated it.

        Route: GET /v1/models/<name>/versions/<number>

        Args:
            name: the model's name.
            number: the version's number, from 1 on.

        Returns:
            The version's content, where it came from, and its evaluations.

        Raises:
            RefusedError: 404: there is no such model or version for this token.
        """
        return self._connection.get(make_path("models", name, "versions", number), VersionDetail)

    def promote(self, name: str, number: int, *, key: str | None = None) -> ModelInfo:
        """Offer a version to all devices at once.

        Route: POST /v1/models/<name>/promote

        Args:
            name: the model's name.
            number: the version's number, from 1 on.
            key: with the same key (16 to 64 letters, digits, "-" or "_") this happens only once; None: once for this
                call.

        Returns:
            The model, now with this version promoted.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model for this token. 409: the
                version is rejected, a rollout of the model is under way, or the key was used for another request. 422:
                there is no such version, or its bundle has expired.
        """
        return self._connection.post(
            make_path("models", name, "promote"), ModelInfo, PromotionRequest(version=number), key=key
        )

    def roll_back(self, name: str, *, key: str | None = None) -> ModelInfo:
        """Undo the rollout under way, or without one the last promotion.

        Route: POST /v1/models/<name>/rollback

        Args:
            name: the model's name.
            key: with the same key (16 to 64 letters, digits, "-" or "_") this happens only once; None: once for this
                call.

        Returns:
            The model, now with an earlier version promoted.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model for this token. 409:
                there is nothing to go back to, or the key was used for another request.
        """
        return self._connection.post(make_path("models", name, "rollback"), ModelInfo, key=key)

    def promotions(self, name: str) -> Iterator[PromotionInfo]:
        """Go through the promotions: which version was for all devices, and from when on.

        Route: GET /v1/models/<name>/promotions

        Args:
            name: the model's name.

        Returns:
            The promotions, newest first, fetched as they are reached.

        Raises:
            RefusedError: 404: there is no such model for this token; at the first item.
        """
        return self._connection.pages(make_path("models", name, "promotions"), PromotionPage)

    def reject(self, name: str, number: int, reason: str) -> VersionInfo:
        """Mark a version as rejected: it cannot be promoted until it is restored.

        Route: POST /v1/models/<name>/versions/<number>/reject

        Args:
            name: the model's name.
            number: the version's number, from 1 on.
            reason: what is wrong with it, in at most 512 characters.

        Returns:
            The version, now rejected.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model or version for this
                token. 409: the version is promoted, or a rollout of it is under way.
        """
        return self._connection.post(
            make_path("models", name, "versions", number, "reject"), VersionInfo, RejectionRequest(reason=reason)
        )

    def keep(self, name: str, *, versions: int | None = None, days: float | None = None) -> ModelInfo:
        """Set which weights of a model's versions the server keeps, beside everything that is in use.

        Route: POST /v1/models/<name>/retention

        Args:
            name: the model's name.
            versions: those of so many newest versions, 0: of all; None: as the server's setting keep_versions says.
            days: those of so many last days; None: as the server's setting keep_days says.

        Returns:
            The model with its rule.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model for this token.
        """
        request = RetentionRequest(keep_versions=versions, keep_days=days)
        return self._connection.post(make_path("models", name, "retention"), ModelInfo, request)

    def restore(self, name: str, number: int) -> VersionInfo:
        """Take back the rejection of a version. Any other version stays as it is.

        Route: POST /v1/models/<name>/versions/<number>/restore

        Args:
            name: the model's name.
            number: the version's number, from 1 on.

        Returns:
            The version, which may be promoted again.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such model or version for this
                token.
        """
        return self._connection.post(make_path("models", name, "versions", number, "restore"), VersionInfo)
