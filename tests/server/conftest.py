"""A server on a real data folder, a clock that tests turn, and devices that speak the protocol."""

from __future__ import annotations

from tests.support.fixtures.server import (  # noqa: F401
    bundle_file,
    bundle_maker,
    data_folder,
    device,
    device_maker,
    empty_database,
    keys,
    server_settings,
    world,
)
