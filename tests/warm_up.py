"""What `scripts/forker.py` does once for the processes of the short suite, which are forks of it."""

from __future__ import annotations

import importlib

from tests import exporter, migrated, url_rules

LIBRARIES = (
    "archipel.converter", "archipel.compression", "archipel.client", "archipel.server.app", "archipel.edge",
    "archipel.server.processes.coordinator", "archipel.simulation", "archipel.training.cloud", "archipel.cli.main",
    "matplotlib.figure", "safetensors.torch",
)  # fmt: skip
"""What takes long to import. Only the long suite, which does not fork, measures coverage."""


def warm_up() -> None:
    """Import the product, and compute what most tests would. No thread is left behind."""
    for library in LIBRARIES:
        importlib.import_module(library)
    exporter.warm_up()
    url_rules.compile_late()
    migrated.migrated_database()
