"""Rollouts: the server offers a version to more and more devices of a population, with a gate after each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from archipel.operator.connection import Resource, make_path
from archipel.operator.waiting import wait_until_ended
from archipel.protocol.operator.registry import RolloutInfo, RolloutPage, RolloutRequest


class Rollouts(Resource):
    """`OperatorClient.rollouts`. `rollout_id` is a rollout's id, 32 hexadecimal digits (`RolloutInfo.rollout_id`)."""

    def create(self, request: RolloutRequest, *, key: str | None = None) -> RolloutInfo:
        """Begin to offer a version to more and more devices.

        Route: POST /v1/rollouts

        Args:
            request: which version, in which stages, and through which gate; times in it are in seconds.
            key: with the same key (16 to 64 letters, digits, "-" or "_") the same rollout is made only once, however
                often this is called; None: once for this call, however often it has to be sent.

        Returns:
            The rollout, in its first stage.

        Raises:
            RefusedError: 403: the token lacks the role operator, or the gate is over devices with an eligibility,
                which needs the role admin. 409: no version is promoted, this one is promoted already or is rejected,
                another rollout is under way, or the key was used for another request. 422: the rollout is not possible;
                the text says why.
        """
        return self._connection.post("/v1/rollouts", RolloutInfo, request, key=key)

    def list(self, *, starts: str | None = None, model: str | None = None) -> Iterator[RolloutInfo]:
        """Go through the rollouts in the token's populations, all of them or those of a model.

        Route: GET /v1/rollouts

        Args:
            starts: only those whose id begins with these hexadecimal digits; None: all.
            model: only those of this model; None: of all.

        Returns:
            The rollouts, newest first, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages("/v1/rollouts", RolloutPage, starts=starts, model=model)

    def get(self, rollout_id: str) -> RolloutInfo:
        """Look at one rollout, with the results of each stage.

        Route: GET /v1/rollouts/<rollout_id>

        Args:
            rollout_id: the rollout's id.

        Returns:
            The rollout as it is now.

        Raises:
            RefusedError: 404: there is no such rollout for this token.
        """
        return self._connection.get(make_path("rollouts", rollout_id), RolloutInfo)

    def pause(self, rollout_id: str) -> RolloutInfo:
        """Stay in the stage. After a week the rollout is rolled back.

        Route: POST /v1/rollouts/<rollout_id>/pause

        Args:
            rollout_id: the rollout's id.

        Returns:
            The rollout, now paused.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such rollout for this token. 409:
                the rollout has ended.
        """
        return self._connection.post(make_path("rollouts", rollout_id, "pause"), RolloutInfo)

    def resume(self, rollout_id: str) -> RolloutInfo:
        """Go on with the time that the stage or its evaluation had left.

        Route: POST /v1/rollouts/<rollout_id>/resume

        Args:
            rollout_id: the rollout's id.

        Returns:
            The rollout, no longer paused.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such rollout for this token. 409:
                the rollout has ended.
        """
        return self._connection.post(make_path("rollouts", rollout_id, "resume"), RolloutInfo)

    def abort(self, rollout_id: str) -> RolloutInfo:
        """Roll back: all devices are offered the promoted version again. A rollout that has ended stays as it is.

        Route: POST /v1/rollouts/<rollout_id>/abort

        Args:
            rollout_id: the rollout's id.

        Returns:
            The rollout, now ended.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such rollout for this token.
        """
        return self._connection.post(make_path("rollouts", rollout_id, "abort"), RolloutInfo)

    def wait(
        self,
        rollout_id: str,
        *,
        timeout: float | None = None,
        poll: float = 0.5,
        on_change: Callable[[RolloutInfo], None] | None = None,
    ) -> RolloutInfo:
        """Wait until a rollout has ended, with or without success.

        Calls: get

        Args:
            rollout_id: the rollout's id.
            timeout: seconds after which this gives up; None: never.
            poll: seconds between two questions.
            on_change: called with the rollout at first, and then whenever it has changed.

        Returns:
            The rollout, which is completed or rolled back.

        Raises:
            ClientError: the time is over.
            UnreachableError, RefusedError: the server was away all the time that was left, without a `timeout` for ten
                minutes.
        """
        return wait_until_ended(
            lambda: self.get(rollout_id),
            lambda rollout: rollout,
            lambda rollout: (
                f"the rollout of {rollout.model} version {rollout.version} has not ended: "
                f"{rollout.state}, stage {rollout.stage} of {len(rollout.stages)}"
            ),
            timeout=timeout,
            poll=poll,
            on_change=on_change,
            on_outage=self._connection.on_outage,
        )
