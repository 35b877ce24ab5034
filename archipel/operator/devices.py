"""Enrolled devices, including revoked ones."""

from __future__ import annotations

from collections.abc import Iterator

from archipel.operator.connection import Resource, make_path
from archipel.protocol.operator.devices import DeviceInfo, DevicePage, DeviceState


class Devices(Resource):
    """`OperatorClient.devices`. `device_id` is a device's id, 32 hexadecimal digits (`DeviceInfo.device_id`)."""

    def list(
        self, *, population: str | None = None, state: DeviceState | None = None, starts: str | None = None
    ) -> Iterator[DeviceInfo]:
        """Go through the devices of the token's populations.

        Route: GET /v1/devices

        Args:
            population: only those of this one; None: of all.
            state: only "active" ones (all that were not revoked), "set-aside" or "revoked" ones; None: all.
            starts: only those whose id begins with these hexadecimal digits; None: all.

        Returns:
            The devices, newest first, fetched as they are reached.

        Raises:
            RefusedError: 403: the token is not for this population. 400: there is no such state. Both at the first
                item.
        """
        return self._connection.pages("/v1/devices", DevicePage, population=population, state=state, starts=starts)

    def get(self, device_id: str) -> DeviceInfo:
        """Look at one device.

        Route: GET /v1/devices/<device_id>

        Args:
            device_id: the device's id.

        Returns:
            What the server knows of it, without the attributes that the device reports of itself.

        Raises:
            RefusedError: 404: there is no such device for this token.
        """
        return self._connection.get(make_path("devices", device_id), DeviceInfo)

    def revoke(self, device_id: str) -> DeviceInfo:
        """End a device's membership for good. A device that was revoked stays as it is.

        Route: POST /v1/devices/<device_id>/revoke

        Args:
            device_id: the device's id.

        Returns:
            The device, now revoked.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such device for this token.
        """
        return self._connection.post(make_path("devices", device_id, "revoke"), DeviceInfo)

    def release(self, device_id: str) -> DeviceInfo:
        """Let rounds take a device again that the server has set aside. Any other device stays as it is.

        Route: POST /v1/devices/<device_id>/release

        Args:
            device_id: the device's id.

        Returns:
            The device, now without a quarantine.

        Raises:
            RefusedError: 403: the token lacks the role operator. 404: there is no such device for this token.
        """
        return self._connection.post(make_path("devices", device_id, "release"), DeviceInfo)
