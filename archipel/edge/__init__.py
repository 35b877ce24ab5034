"""An edge server's uplink: the thread with which a server takes part in the rounds of the server above it.

The edge is a member of its upstream as a device is, with the agent of `archipel.client`. In place of a training of its
own it contributes the sum of a round of its own devices, which its coordinator carries out
(`archipel.server.rounds.sites`); docs/edge.md has the whole.
"""

from archipel.edge.uplink import run_uplink

__all__ = ["run_uplink"]
