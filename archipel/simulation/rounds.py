"""The rounds of a simulated federation, one after the other: the server's half of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from archipel import strategies
from archipel.bundle import Bundle, write_weights
from archipel.bundle.roles import Largest
from archipel.errors import ArchipelError, SimulationError
from archipel.privacy import Gaussian, spent_epsilon
from archipel.privacy.central import Noise, draw_noise, events_of
from archipel.privacy.drowning import drowning_hint, mean_noise
from archipel.protocol.messages import Protocol, RoundPlan
from archipel.protocol.metrics.training_metrics import UPDATE_CLIP
from archipel.protocol.metrics.training_result import split_metrics
from archipel.protocol.operator.differential_privacy import DifferentialPrivacy
from archipel.protocol.operator.results import Distribution, RoundResult
from archipel.protocol.uploads import clip_input, plan_layout, upload_layout, upload_program
from archipel.protocol.vector import DecodedSum
from archipel.simulation.attacks import Attack
from archipel.simulation.clients import Clients
from archipel.simulation.combining import Combining
from archipel.simulation.draws import draw_cohort, drawn_uniform
from archipel.simulation.secure.noise import multiplier_of, plan_noise
from archipel.simulation.secure.protocol import sizes_of_rounds
from archipel.simulation.several import SeveralModels
from archipel.simulation.system.round_clock import ClockState, RoundClock
from archipel.simulation.system.settings import Pacing, System
from archipel.simulation.work import Engine, Partial, Report, Work
from archipel.strategies.clipping import next_clip
from archipel.strategies.moving import move_model
from archipel.strategies.registry import misfit
from archipel.strategies.robust import Aggregation
from archipel.strategies.running_statistics import shared_statistics, split_statistics
from archipel.strategies.step_limits import History
from archipel.strategies.strategy import Began, Tensors
from archipel.strategies.update_compression import first_bases, round_seed, split_bases

_NOBODY = "0" * 64


class RoundRow(msgspec.Struct, kw_only=True):
    """One round of the history.

    `devices`: whose updates are in the sum, of `drawn` that were asked. `metrics`: means over the cohort's training;
    `clipped`: how many updates were, None where the bundle has devices not say it; `clip`: the L2 norm to which the
    round clipped, where the server adapts it. `step`, `state_step`: L2 norms of the change of the parameters, and of
    the strategy's state. `tested`: metrics of the model after the round on the test examples, where they were measured.
    `spread`: the same metrics over the devices, each on examples of its own, where they were measured so; `binned`: as
    a server would learn these, from counts of devices in bins.
    `releases`: how many sums with noise there were up to this round; `epsilon`: what they cost together; `multiplier`:
    the noise multiplier of this round's sum, where devices add the noise.
    `failed`: why the round changed nothing, "" where it did. `seconds`: how long the simulation took for it.

    With a system: `time`, seconds by the virtual clock from the run's beginning to the round's end; `bytes_down` and
    `bytes_up`, what devices fetched and uploaded for it; `stale`, how many versions the updates were behind on average.

    Example: see `archipel.simulate`.
    """

    number: int
    drawn: int
    devices: int
    metrics: dict[str, float] = {}
    clipped: int | None = None
    clip: float | None = None
    step: float = 0.0
    state_step: float = 0.0
    tested: dict[str, float] = {}
    spread: dict[str, Distribution] = {}
    binned: dict[str, Distribution] = {}
    releases: int = 0
    multiplier: float | None = None
    epsilon: float | None = None
    failed: str = ""
    seconds: float = 0.0
    time: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    stale: float = 0.0


class RoundSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What decides the rounds, beside bundle and data.

    `cohort`: devices asked in each round. `dropout`: the share of these that leave before their update counts.
    `privacy`: "secure" adds up whole numbers as secure rounds do, "plain" floating point. `hyperparameters`: of the
    devices' programs and of the server's half, as of a task. `pacing`: when rounds take their updates; what differs
    from its defaults needs a `system`, whose clock times the rounds. `aggregation` is the rule of plain rounds, or over
    the sums of `secure_groups` groups of the cohort, drawn for each round (0: one sum of all). `protocol`: of secure
    rounds (None: what a server would choose). `attack`: what some devices send. `differential_privacy`: the noise on
    each sum, with its multiplier settled. `root`: the last client has the server's own examples, for a rule that takes
    an update of them.
    """

    cohort: int
    seed: int = 0
    privacy: str = "secure"
    dropout: float = 0.0
    hyperparameters: dict[str, float] = {}
    pacing: Pacing = Pacing()
    system: System | None = None
    aggregation: Aggregation = Aggregation()
    secure_groups: int = 0
    protocol: Protocol | None = None
    attack: Attack = Attack()
    differential_privacy: DifferentialPrivacy = DifferentialPrivacy()
    root: bool = False


@dataclass
class Standing:
    """Where a simulation stands: everything that the next round depends on but devices' states."""

    parameters: Tensors
    strategy_state: Tensors
    rows: list[RoundRow] = field(default_factory=list)
    clock: ClockState = field(default_factory=ClockState)
    past: dict[int, Tensors] = field(default_factory=dict)
    """The parameters of the versions that devices at work began with, in an asynchronous task."""
    rule_state: Tensors = field(default_factory=dict)
    noise: list[Noise] = field(default_factory=list)
    """What was added to the last sums, the newest first, of which later rounds take back a part."""
    rested: list[list[int]] = field(default_factory=list)
    """The clients of the last sums, the newest first, which rest until others had so many rounds."""


class Rounds:
    """Runs rounds on an engine. `standing` changes with every round, as the server's database would.

    Arguments:
        bundle, settings: as of `run`.
        population: how many clients there are.
        standing: where to go on, None to begin.
        clients: the clients, for a system's clock; without them rounds have none.
        models: where clients have different ones, for the clock.

    Raises SimulationError for settings that do not fit the bundle, ProtocolError where no modulus holds the sum.
    """

    def __init__(
        self,
        bundle: Bundle,
        population: int,
        settings: RoundSettings,
        standing: Standing | None,
        clients: Clients | None = None,
        models: SeveralModels | None = None,
    ) -> None:
        # The server's own examples are no device's.
        population -= settings.root
        self._bundle, self._population, self._settings = bundle, population, settings
        manifest = bundle.manifest
        if not 1 <= settings.cohort <= population:
            raise SimulationError(f"cohort: {settings.cohort} is not from 1 to {population}, the number of clients")
        separation = settings.differential_privacy.separation or 1
        if separation * settings.cohort > population:
            raise SimulationError(
                f"differential_privacy.separation: {separation} rounds in a row have no client in common, which takes "
                f"{separation * settings.cohort} clients, and there are {population}; lower cohort or separation"
            )
        self._strategy = strategies.get(manifest.strategy)
        finish = upload_program(manifest, "training")
        self._clip = None if UPDATE_CLIP in settings.hyperparameters else clip_input(finish)
        layout = upload_layout(manifest, "training")
        if settings.privacy == "secure" and any(isinstance(port.carries, Largest) for port in layout.updates):
            raise SimulationError(
                "privacy: 'secure' adds up vectors, and compress 'top_k' sends elements of each device's own choice; "
                "set privacy to 'plain', or compress to 'random_k'"
            )
        if settings.protocol is not None:
            sizes_of_rounds(manifest, settings)
        self._combining = Combining(manifest, layout, population, settings)
        self._noised = plan_noise(manifest, settings)
        self._bits = self._combining.modulus_bits(layout)
        if self._noised is not None and self._bits is not None:
            self._bits = self._noised.modulus_bits
        if standing is None:
            parameters = bundle.parameters()
            trained, _ = split_statistics(parameters, shared_statistics(manifest))
            standing = Standing(parameters, {**self._strategy.init(trained), **first_bases(manifest)})
        self.standing = standing
        done = [row for row in standing.rows if not row.failed]
        self._drawn: list[int] = []
        self._history = History([row.step for row in done], [row.state_step for row in done])
        self._clock: RoundClock | None = None
        if settings.system is not None and clients is not None:
            broadcast = self._broadcast()
            size = len(write_weights(broadcast)) if broadcast else 0
            self._clock = RoundClock(bundle, clients, settings, size, self._combining.divide, models)
        why = misfit(self._strategy, settings.pacing.mode, settings.privacy, settings.cohort)
        if why:
            raise SimulationError(why)

    def run(self, engine: Engine, saved: int = 0) -> tuple[RoundRow, list[Report]]:
        """One round. Returns its row, which is the last of `standing.rows`, and what each device did."""
        number = len(self.standing.rows) + 1
        row = RoundRow(number=number, drawn=0, devices=0, releases=self._releases)
        if row.releases:
            row.epsilon = self.standing.rows[-1].epsilon
        drawn, present, left = self._draw(number) if self._clock is None else self._time(row, self._clock)
        row.drawn, self._drawn = len(drawn), drawn
        gone = tuple(client for client in drawn if client not in present)
        work = self._combining.plan(replace(self._work(number, saved), dropped=gone), drawn)
        row.clip = work.hyperparameters.get(UPDATE_CLIP)
        reports = [Report(client, left=left.get(client, row.failed)) for client in drawn if client not in present]
        root = self._combining.root
        asked = [client for client in drawn if client in present] + ([] if root is None or row.failed else [root])
        partial = engine.run(work, asked)
        # The server's own update is no device's.
        partial.reports = [report for report in partial.reports if report.client != root]
        self._conclude(row, partial, work)
        return row, sorted([*reports, *partial.reports], key=lambda report: report.client)

    def _conclude(self, row: RoundRow, partial: Partial, work: Work | None = None, began: Began | None = None) -> None:
        """Move the model by the sum of the round's updates, unless it failed, and add its row to the history."""
        row.devices = partial.counted
        try:
            if row.failed:
                raise SimulationError(row.failed)
            if not row.devices:
                raise SimulationError("no device's update came")
            work = work or self._work(row.number, 0)
            # Before the sum is looked at: a round that fails from here on has been paid for.
            self._charge(row)
            noise = self._draw_noise(work)
            made = self._combining.combine(work, partial.total, row.devices, self.standing.rule_state, noise)
            row.devices = made.devices
            self._move(row, made.total, work, began)
            self.standing.rule_state = made.state
        except ArchipelError as error:
            # As on the server: a round that fails leaves the model as it was, and the next one begins.
            row.failed = str(error)
        self.standing.rows.append(row)

    @property
    def spent(self) -> str:
        """Why no further round may begin: it would cost more than the settings allow. "" where it may."""
        noise = self._settings.differential_privacy
        if not noise.is_private or noise.epsilon is None:
            return ""
        cost = self._cost(self._releases + 1, noise.noise_multiplier)
        if cost <= noise.epsilon:
            return ""
        return f"another round would cost epsilon {cost:.4g} in all, and {noise.epsilon:g} is allowed"

    @property
    def _releases(self) -> int:
        return self.standing.rows[-1].releases if self.standing.rows else 0

    def _charge(self, row: RoundRow) -> None:
        if self._noised is not None:
            row.multiplier = multiplier_of(self._noised, self._bundle.manifest, row.devices)
        if self._settings.differential_privacy.is_private:
            row.releases += 1
            row.epsilon = self._cost(row.releases, row.multiplier)

    def _cost(self, releases: int, last: float | None) -> float:
        """What so many sums cost; where devices add the noise, the last one with that noise multiplier."""
        noise = self._settings.differential_privacy
        if not noise.on_devices:
            return spent_epsilon(events_of(noise, 0, releases), noise.delta)
        multipliers = [*(row.multiplier for row in self.standing.rows), last]
        return spent_epsilon([Gaussian(noise_multiplier=each) for each in multipliers if each], noise.delta)

    def _draw_noise(self, work: Work) -> Noise | None:
        """The noise of the round whose sum is paid for; of correlated noise, what later rounds need is kept."""
        settings, standing = self._settings.differential_privacy, self.standing
        if not settings.is_central:
            return None
        noise = draw_noise(settings, work.layout, standing.noise)
        if settings.is_correlated and settings.separation is not None:
            standing.noise = [noise, *standing.noise][: len(settings.coefficients) - 1]
            standing.rested = [self._drawn, *standing.rested][: settings.separation - 1]
        return noise

    def first_work(self) -> Work:
        """What devices get in the first round."""
        return self._work(1, 0)

    def hints(self, rounds: int) -> list[str]:
        """What the settings make likely to go wrong in so many rounds, with what would help."""
        settings = self._settings
        if not settings.differential_privacy.is_private:
            return []
        # As many as stay, on average.
        devices = settings.pacing.goal or max(round(settings.cohort * (1 - settings.dropout)), 1)
        noise = mean_noise(
            settings.differential_privacy, self.first_work().layout, devices=devices, rounds=rounds,
            share=None if self._noised is None else self._noised.noise,
        )  # fmt: skip
        hint = drowning_hint(settings.differential_privacy, noise, rounds)
        return [hint] if hint else []

    def _draw(self, number: int) -> tuple[list[int], set[int], dict[int, str]]:
        """Who is drawn, who of them stays to the end, and why others do not."""
        settings = self._settings
        resting = self._resting()
        drawn = draw_cohort(self._population, settings.cohort, settings.seed, number, resting).tolist()
        present = {
            client
            for client in drawn
            if not settings.dropout or drawn_uniform("dropout", settings.seed, number, client) >= settings.dropout
        }
        return drawn, present, {client: "dropped out" for client in drawn if client not in present}

    def _resting(self) -> set[int]:
        """Clients that were in one of the last sums, so that their changes would add up in correlated noise."""
        return {client for clients in self.standing.rested for client in clients}

    def _time(self, row: RoundRow, clock: RoundClock) -> tuple[list[int], set[int], dict[int, str]]:
        """The same on the virtual clock, which goes on to the round's end."""
        drawn, outcome = clock.run(row.number, self.standing.clock, self._resting())
        row.time, row.failed = outcome.end, outcome.failed
        row.bytes_down, row.bytes_up = round(outcome.down), round(outcome.up)
        return drawn, set(outcome.counted), outcome.left

    def _work(self, number: int, saved: int) -> Work:
        settings, standing = self._settings, self.standing
        given = {**round_seed(self._bundle.manifest, number), **settings.hyperparameters, **self._adapted_clip()}
        own = self._strategy.server_hyperparameters
        hyperparameters = {name: value for name, value in given.items() if name not in own}
        plan = RoundPlan(
            round_id="0" * 32, task_id="0" * 32, number=number, bundle=self._bundle.digest, weights=_NOBODY,
            privacy="plain", min_cohort=1, max_cohort=settings.cohort, threshold=1, modulus_bits=self._bits or 32,
            hyperparameters=hyperparameters, noise=None if self._noised is None else self._noised.noise,
        )  # fmt: skip
        return Work(
            number=number,
            parameters=standing.parameters,
            broadcast=self._broadcast(),
            hyperparameters=hyperparameters,
            layout=plan_layout(plan, self._bundle.manifest),
            cohort=settings.cohort,
            modulus_bits=self._bits,
            seed=settings.seed,
            saved=saved,
        )

    def _broadcast(self) -> Tensors:
        """What devices get beside the parameters."""
        state, bases = split_bases(self.standing.strategy_state)
        return {**self._strategy.broadcast(state), **bases}

    def _adapted_clip(self) -> Mapping[str, float]:
        """The clip that the server would send: it follows from the last round that changed the model."""
        if self._clip is None or self._settings.pacing.mode == "asynchronous":
            return {}
        last = next((row for row in reversed(self.standing.rows) if not row.failed), None)
        if last is None or last.clipped is None or last.clip is None:
            return {UPDATE_CLIP: self._clip.default}
        return {UPDATE_CLIP: next_clip(last.clip, last.clipped, last.devices, self._clip)}

    def _move(self, row: RoundRow, total: DecodedSum, work: Work, began: Began | None) -> None:
        result, rest = split_metrics(total, row.devices)
        if isinstance(result, RoundResult):
            row.metrics, row.clipped = result.metrics, result.clipped
        standing = self.standing
        parameters, state, step = move_model(
            self._strategy, self._bundle.manifest, standing.parameters, standing.strategy_state, rest, row.devices,
            self._settings.hyperparameters, self._history, work.hyperparameters, began,
        )  # fmt: skip
        # Another order would change what a broadcast or a digest of them is.
        standing.parameters = {name: parameters[name] for name in standing.parameters}
        standing.strategy_state = state
        row.step, row.state_step = step.parameters, step.state
        self._history.add(step)
