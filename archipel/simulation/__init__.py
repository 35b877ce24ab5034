"""Federations without a server: the same programs, server halves and sums as in production, on one machine."""

from __future__ import annotations

from archipel.protocol.messages.distributions import Bins
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.simulation.attacks import Attack
from archipel.simulation.clients import Clients, DrawnClients, ListedClients, SplitClients
from archipel.simulation.evaluation import Evaluation
from archipel.simulation.federation import Federation, load_federation
from archipel.simulation.result import ClientRow, Result
from archipel.simulation.rounds import RoundRow
from archipel.simulation.simulate import simulate
from archipel.simulation.splitting import split_clients
from archipel.simulation.system import Device, Pacing, Spread, System, read_devices
from archipel.simulation.tuning import Range, TuneSettings, Tuning, tune
from archipel.strategies.robust import Aggregation

__all__ = [
    "Aggregation",
    "Attack",
    "Bins",
    "ClientRow",
    "Clients",
    "Device",
    "DifferentialPrivacy",
    "DrawnClients",
    "Evaluation",
    "Federation",
    "ListedClients",
    "Pacing",
    "Range",
    "Result",
    "RoundRow",
    "SplitClients",
    "Spread",
    "System",
    "TuneSettings",
    "Tuning",
    "load_federation",
    "read_devices",
    "simulate",
    "split_clients",
    "tune",
]
