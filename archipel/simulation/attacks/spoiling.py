"""Clients some of which train on spoiled examples."""

from __future__ import annotations

from functools import partial

from archipel.bundle import Bundle
from archipel.bundle.roles import Example, Label, Output
from archipel.errors import SimulationError
from archipel.lite_runtime.training.driver import data_ports
from archipel.simulation.attacks.data import DATA_ATTACKS, Examples
from archipel.simulation.attacks.settings import Attack, draw_attackers
from archipel.simulation.clients import Clients, change_clients


def spoil_clients(bundle: Bundle, clients: Clients, attack: Attack, population: int, seed: int) -> Clients:
    """The clients, with spoiled examples where an attack over examples has them; others are as they were.

    Raises SimulationError for a bundle that has not one input, one label and classes.
    """
    if attack.name not in DATA_ATTACKS:
        return clients
    ports = data_ports(bundle, bundle.manifest.schedule)
    inputs = [port.name for port in ports if isinstance(port, Example)]
    labels = [port.name for port in ports if isinstance(port, Label)]
    outputs = [port for program in bundle.manifest.programs.values() for port in program.outputs]
    sizes = [port.shape[-1] for port in outputs if isinstance(port, Output) and port.shape]
    if len(inputs) != 1 or len(labels) != 1 or not sizes or not isinstance(sizes[0], int):
        raise SimulationError(
            f"attack {attack.name!r}: bundle {bundle.manifest.name!r} has not one input, one label and a prediction of "
            "classes; give clients whose examples you spoil yourself"
        )
    # Functions of modules alone, so that clients can be sent to other processes.
    spoil = partial(_spoil, name=attack.name, inputs=inputs[0], label=labels[0], classes=sizes[0])
    return change_clients(clients, draw_attackers(attack, population, seed), spoil)


def _spoil(examples: Examples, *, name: str, inputs: str, label: str, classes: int) -> Examples:
    return DATA_ATTACKS[name].spoil(examples, inputs, label, classes)
