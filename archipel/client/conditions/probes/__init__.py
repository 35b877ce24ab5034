"""Probes: each measures one thing of the device, such as its power supply or its network."""
