"""Populations: named groups of devices that train together."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource, make_path
from archipel.protocol.operator.devices import PopulationInfo, PopulationPage


class Populations(Resource):
    """`OperatorClient.populations`. A population exists once a device has enrolled in it, or a task was made for it."""

    def list(self) -> Iterator[PopulationInfo]:
        """Go through the token's populations.

        Route: GET /v1/populations

        Returns:
            The populations by name, each with numbers of devices, fetched as they are reached.

        Raises:
            RefusedError: no status that other calls do not have; at the first item.
        """
        return self._connection.pages("/v1/populations", PopulationPage)

    def get(self, name: str) -> PopulationInfo:
        """Look at one population.

        Route: GET /v1/populations/<name>

        Args:
            name: the population's name.

        Returns:
            How many of its devices are enrolled, waiting, in rounds, and set aside.

        Raises:
            RefusedError: 403: the token is not for this population. 404: it has no device and no task.
        """
        return self._connection.get(make_path("populations", name), PopulationInfo)
