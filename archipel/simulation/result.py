"""What a simulation gives: its history, its model, and what each client did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from archipel.bundle import Bundle
from archipel.errors import MissingExtraError, SimulationError
from archipel.protocol.metrics.measures import Measured
from archipel.protocol.operator.results import Distribution
from archipel.simulation.rounds import RoundRow
from archipel.simulation.work import Report


class ClientRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One client over the whole run: rounds that it was drawn for and that counted it, and its last mean loss.

    `tested`: what it measured in the last evaluation over the devices, on `test_examples` labels of its own.

    Example: see `archipel.simulation.Result`.
    """

    client: int
    examples: int = 0
    drawn: int = 0
    counted: int = 0
    loss: float | None = None
    tested: dict[str, float] = {}
    test_examples: int = 0


@dataclass(eq=False)
class Result:
    """The result of a simulation.

    Attributes:
        history: a row for each round, oldest first.
        parameters: the federated model's parameters by name.
        bundle: the bundle whose programs ran; `runtime.set_parameters(result.parameters)` gives the model to use.
        engine: how the local rounds were run, and why so.
        hints: what the settings make likely to go wrong, with what would help.
        ended: why the run ended before its last round, "" where it did not: the privacy budget is spent.
        clients: what each client that was drawn, or measured the model, did, by its number.

    Example:
        clients = simulation.SplitClients({"input": x, "label": y}, datasets.split_iid(len(y), 10))
        result = archipel.simulate(network, clients, rounds=3, cohort=4)
        print(result.table()["training loss"], result.parameters["head.bias"].shape)
    """

    history: list[RoundRow]
    parameters: Mapping[str, NDArray[Any]] = field(repr=False)
    bundle: Bundle = field(repr=False)
    engine: str = ""
    hints: list[str] = field(default_factory=list)
    ended: str = ""
    clients: dict[int, ClientRow] = field(default_factory=dict, repr=False)

    def add(self, reports: list[Report]) -> None:
        """Count a round's reports."""
        for report in reports:
            row = self.clients.setdefault(report.client, ClientRow(client=report.client))
            row.drawn += 1
            if not report.left:
                row.counted, row.examples = row.counted + 1, report.examples
                row.loss = report.loss if report.loss is not None else row.loss

    def add_tests(self, found: Mapping[int, Measured]) -> None:
        """Take over what clients measured."""
        for client, each in found.items():
            row = self.clients.setdefault(client, ClientRow(client=client))
            row.tested, row.test_examples = dict(each.values), each.count

    def table(self) -> dict[str, NDArray[Any]]:
        """The history by column, `[rounds]` each: a column for every field and metric; NaN where there is none."""
        # Here and below imported when asked for: with it comes the client of a server's operator.
        from archipel.operator import curves

        names = sorted({name for row in self.history for name in row.metrics})
        tested = sorted({name for row in self.history for name in row.tested})
        columns: dict[str, NDArray[Any]] = {
            "round": np.array([row.number for row in self.history], np.int64),
            "drawn": np.array([row.drawn for row in self.history], np.int64),
            "devices": np.array([row.devices for row in self.history], np.int64),
            "seconds": np.array([row.seconds for row in self.history], np.float64),
            "step": np.array([row.step for row in self.history], np.float64),
        }
        if any(row.time for row in self.history):
            columns["time"] = np.array([row.time for row in self.history], np.float64)
            columns["bytes down"] = np.array([row.bytes_down for row in self.history], np.int64)
            columns["bytes up"] = np.array([row.bytes_up for row in self.history], np.int64)
            columns["stale"] = np.array([row.stale for row in self.history], np.float64)
        if any(row.epsilon is not None for row in self.history):
            columns["epsilon"] = np.array([np.nan if row.epsilon is None else row.epsilon for row in self.history])
        for name in names:
            columns[name] = np.array([row.metrics.get(name, np.nan) for row in self.history])
        for name in tested:
            columns[f"test {name}"] = np.array([row.tested.get(name, np.nan) for row in self.history])
        for name in sorted({name for row in self.history for name in row.spread}):
            for column, figure in curves.FIGURES.items():
                columns[f"{name} {column}"] = np.array(
                    [figure(row.spread[name]) if name in row.spread else np.nan for row in self.history]
                )
        return columns

    def client_table(self) -> dict[str, NDArray[Any]]:
        """What each client of `clients` did, by column, `[clients]` each; a loss that is not known is NaN."""
        rows = [self.clients[number] for number in sorted(self.clients)]
        columns: dict[str, NDArray[Any]] = {
            name: np.array([getattr(row, name) for row in rows], np.int64)
            for name in ("client", "examples", "drawn", "counted")
        }
        columns["loss"] = np.array([np.nan if row.loss is None else row.loss for row in rows], np.float64)
        if any(row.test_examples for row in rows):
            columns["test examples"] = np.array([row.test_examples for row in rows], np.int64)
        for name in sorted({name for row in rows for name in row.tested}):
            columns[f"test {name}"] = np.array([row.tested.get(name, np.nan) for row in rows], np.float64)
        return columns

    def plot(self, path: Path | str) -> None:
        """Draw the metrics over the rounds: losses above, the others below; of the test data as `test NAME`, over the
        devices as `devices' NAME`, with a band from decile 1 to 9 and the worst tenth.

        Arguments:
            path: a .png, .svg or .pdf, which is replaced.

        Raises ClientError for another name, MissingExtraError without `archipel[curves]`, SimulationError where no
        round has a metric.
        """
        from archipel.operator import curves

        points: dict[str, list[tuple[int, float]]] = {}
        tests: dict[str, list[tuple[int, float]]] = {}
        for row in self.history:
            for name, value in row.metrics.items():
                points.setdefault(name, []).append((row.number, value))
            for name, value in row.tested.items():
                tests.setdefault(f"test {name}", []).append((row.number, value))
        # In this order whatever came first, so that a curve has the same colour in each picture.
        points.update(tests)
        spread: dict[str, list[tuple[int, Distribution]]] = {}
        for row in self.history:
            for name, distribution in row.spread.items():
                spread.setdefault(f"devices' {name}", []).append((row.number, distribution))
        if not points and not spread:
            raise SimulationError(
                "no curves: no round has metrics; give `test` data, or a bundle that was converted with a loss_range"
            )
        curves.draw(points, Path(path), spread)

    def to_parquet(self, path: Path | str) -> None:
        """Write the history, and into NAME-clients.parquet beside NAME.parquet a row for each client that was drawn.

        Raises MissingExtraError without `archipel[data]`.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise MissingExtraError("pyarrow", "data") from None
        columns = {**self.table(), "failed": np.array([row.failed for row in self.history], object)}
        path = Path(path)
        pq.write_table(pa.table(columns), path)
        pq.write_table(pa.table(self.client_table()), path.with_name(f"{path.stem}-clients{path.suffix}"))
