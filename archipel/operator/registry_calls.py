"""The part of the operator's client about models, versions, rollouts and metrics."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from archipel.errors import ClientError, RefusedError, UnreachableError
from archipel.protocol.operator.registry import (
    MetricsPage,
    ModelInfo,
    ModelPage,
    ModelRequest,
    PromotionInfo,
    PromotionPage,
    PromotionRequest,
    RejectionRequest,
    RolloutInfo,
    RolloutPage,
    RolloutRequest,
    RoundMetrics,
    VersionDetail,
    VersionInfo,
    VersionPage,
    VersionRequest,
)
from archipel.protocol.operator.tasks import IDEMPOTENCY_HEADER

T = TypeVar("T")
OUTAGE_SECONDS = 600.0


class RegistryCalls(ABC):
    """Every call may be repeated: what changes something is sent with an idempotency key, or is the same twice."""

    on_outage: Callable[[ClientError | None], None] | None

    @abstractmethod
    def _items(self, path: str, kind: type[Any]) -> Iterator[Any]: ...

    @abstractmethod
    def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = False,
    ) -> T: ...

    def create_model(self, name: str, population: str) -> ModelInfo:
        """Make a model; one that is there already, of the same population, is only shown."""
        return self._post("/v1/models", ModelInfo, ModelRequest(name=name, population=population))

    def models(self) -> Iterator[ModelInfo]:
        """Every model, by name."""
        return self._items("/v1/models", ModelPage)

    def model(self, name: str) -> ModelInfo:
        return self._call("GET", f"/v1/models/{name}", ModelInfo)

    def register_version(self, name: str, request: VersionRequest) -> VersionInfo:
        """Register a bundle or what a task made; content that is registered already is only shown."""
        return self._post(f"/v1/models/{name}/versions", VersionInfo, request)

    def versions(self, name: str) -> Iterator[VersionInfo]:
        """Every version of a model, newest first."""
        return self._items(f"/v1/models/{name}/versions", VersionPage)

    def version(self, name: str, number: int) -> VersionDetail:
        """One version with its evaluations."""
        return self._call("GET", f"/v1/models/{name}/versions/{number}", VersionDetail)

    def promote(self, name: str, number: int, *, key: str | None = None) -> ModelInfo:
        """Make a version the one for all devices."""
        return self._post(f"/v1/models/{name}/promote", ModelInfo, PromotionRequest(version=number), key=key)

    def roll_back(self, name: str, *, key: str | None = None) -> ModelInfo:
        """Take back what came last, the rollout under way or the last promotion; once for this call, or for `key`."""
        return self._post(f"/v1/models/{name}/rollback", ModelInfo, key=key)

    def promotions(self, name: str) -> Iterator[PromotionInfo]:
        """Which version was for all devices from when on, newest first."""
        return self._items(f"/v1/models/{name}/promotions", PromotionPage)

    def reject_version(self, name: str, number: int, reason: str) -> VersionInfo:
        return self._post(f"/v1/models/{name}/versions/{number}/reject", VersionInfo, RejectionRequest(reason=reason))

    def restore_version(self, name: str, number: int) -> VersionInfo:
        """Take back that a version was rejected."""
        return self._post(f"/v1/models/{name}/versions/{number}/restore", VersionInfo)

    def create_rollout(self, request: RolloutRequest, *, key: str | None = None) -> RolloutInfo:
        """Begin a rollout; once for this call, or for `key` (16 to 64 letters, digits, - or _)."""
        return self._post("/v1/rollouts", RolloutInfo, request, key=key)

    def rollouts(self) -> Iterator[RolloutInfo]:
        """Every rollout, newest first."""
        return self._items("/v1/rollouts", RolloutPage)

    def rollout(self, rollout_id: str) -> RolloutInfo:
        return self._call("GET", f"/v1/rollouts/{rollout_id}", RolloutInfo)

    def pause_rollout(self, rollout_id: str) -> RolloutInfo:
        """Stay in the stage; after a week it is rolled back."""
        return self._post(f"/v1/rollouts/{rollout_id}/pause", RolloutInfo)

    def resume_rollout(self, rollout_id: str) -> RolloutInfo:
        return self._post(f"/v1/rollouts/{rollout_id}/resume", RolloutInfo)

    def abort_rollout(self, rollout_id: str) -> RolloutInfo:
        """Roll back: all devices are offered the promoted version again."""
        return self._post(f"/v1/rollouts/{rollout_id}/abort", RolloutInfo)

    def task_metrics(self, task_id: str) -> Iterator[RoundMetrics]:
        """What the committed rounds of a task came to, oldest first."""
        return self._items(f"/v1/tasks/{task_id}/metrics", MetricsPage)

    def wait_rollout(
        self,
        rollout_id: str,
        *,
        timeout: float | None = None,
        poll: float = 0.5,
        on_change: Callable[[RolloutInfo], None] | None = None,
    ) -> RolloutInfo:
        """Wait until the rollout has ended, whichever way. `on_change` sees it whenever it has changed.

        `timeout` and `poll` are in seconds. Raises ClientError when the time is over, UnreachableError or RefusedError
        when the server was away all the time that was left, without a `timeout` for ten minutes.
        """
        return wait_until_ended(
            lambda: self.rollout(rollout_id),
            lambda rollout: rollout,
            lambda rollout: (
                f"the rollout of {rollout.model} version {rollout.version} has not ended: "
                f"{rollout.state}, stage {rollout.stage} of {len(rollout.stages)}"
            ),
            timeout=timeout,
            poll=poll,
            on_change=on_change,
            on_outage=self.on_outage,
        )

    def _post(self, path: str, kind: type[T], body: msgspec.Struct | None = None, *, key: str | None = None) -> T:
        headers = {IDEMPOTENCY_HEADER: key or secrets.token_urlsafe(24)}
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else msgspec.json.encode(body)
        return self._call("POST", path, kind, body=data, headers=headers, repeat=True)


def wait_until_ended(
    ask: Callable[[], T],
    state: Callable[[T], object],
    describe: Callable[[T], str],
    *,
    timeout: float | None,
    poll: float,
    on_change: Callable[[T], None] | None,
    on_outage: Callable[[ClientError | None], None] | None = None,
) -> T:
    """Ask every `poll` seconds until `ended` of the answer is set; `on_change` sees each with another `state`.

    A server that has answered once and does so no more is asked until `timeout`, without one for OUTAGE_SECONDS.
    Raises ClientError, with what `describe` says, after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    give_up: float | None = None
    seen: object = None
    while True:
        try:
            found = ask()
        except (UnreachableError, RefusedError) as error:
            if seen is None or (isinstance(error, RefusedError) and error.status not in (429, 503)):
                raise
            if give_up is None:
                give_up = deadline or time.monotonic() + OUTAGE_SECONDS
                if on_outage is not None:
                    on_outage(error)
            if time.monotonic() > give_up:
                raise
            time.sleep(poll)
            continue
        if give_up is not None:
            give_up = None
            if on_outage is not None:
                on_outage(None)
        if on_change is not None and state(found) != seen:
            on_change(found)
        seen = state(found)
        if found.ended is not None:  # type: ignore[attr-defined]
            return found
        if deadline is not None and time.monotonic() > deadline:
            raise ClientError(f"after {timeout:g} s {describe(found)}")
        time.sleep(poll)
