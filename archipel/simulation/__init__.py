"""Federations without a server: the same programs, server halves and sums as in production, on one machine."""

from __future__ import annotations

from archipel.simulation.clients import Clients, DrawnClients, ListedClients, SplitClients
from archipel.simulation.federation import Federation, load_federation
from archipel.simulation.result import ClientRow, Result
from archipel.simulation.rounds import RoundRow
from archipel.simulation.simulate import simulate
from archipel.simulation.splitting import split_clients

__all__ = [
    "ClientRow",
    "Clients",
    "DrawnClients",
    "Federation",
    "ListedClients",
    "Result",
    "RoundRow",
    "SplitClients",
    "load_federation",
    "simulate",
    "split_clients",
]
