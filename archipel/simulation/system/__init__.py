"""System simulation: devices with speeds, networks and hours of their own, and a virtual clock for their rounds."""

from __future__ import annotations

from archipel.simulation.system.settings import Device, Pacing, Spread, System
from archipel.simulation.system.traces import read_devices

__all__ = ["Device", "Pacing", "Spread", "System", "read_devices"]
