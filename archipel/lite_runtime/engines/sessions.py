"""ONNX Runtime sessions of a bundle's programs, made when first needed and kept.

Graphs are opened by path, so that ONNX Runtime maps their external data (weights.safetensors beside them) and does not
read it. The first session imports ONNX Runtime, so a device that waits for work does not spend memory on it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from archipel.bundle import Bundle
from archipel.engine_registry import ENGINES, Refusal
from archipel.errors import DelegateError, RuntimeProgramError
from archipel.library_errors import one_line
from archipel.lite_runtime.engines.delegates import (
    Delegate,
    DelegateReport,
    Delegates,
    Preference,
    Skipped,
    attempts,
    engines,
    preferences,
)
from archipel.lite_runtime.engines.fastest import FastestSession
from archipel.lite_runtime.engines.kernels import calls_kernels, kernel_pack
from archipel.lite_runtime.engines.onnx_runtime import (
    Session,
    error_types,
    onnxruntime,
    open_exact,
    program_error,
    share_arena,
)
from archipel.lite_runtime.engines.program_session import ProgramSession
from archipel.mode import get_mode

_FASTEST: dict[tuple[str, int], str] = {}
"""The delegate that was fastest in this process, by a graph's SHA-256 and the number of threads."""
_BY_NODE: Delegates = [("torch", {"device": "cpu"})]
_RECORD_PLACEMENT = "session.record_ep_graph_assignment_info"


class Sessions:
    """The sessions of one bundle; any thread may ask for one.

    `threads` is the number of threads inside one operator; `delegates` says what runs the operators (see delegates.py).
    Raises DelegateError for delegates that are unknown, or missing without leave to fall back.
    """

    def __init__(self, bundle: Bundle, threads: int = 1, delegates: Delegates = "auto") -> None:
        self.threads = threads
        # Node by node, for whoever looks for a fault, runs PyTorch, whatever else there is.
        self.delegates: Delegates = _BY_NODE if get_mode() == "eager" else delegates
        self._bundle = bundle
        self._preferences = preferences(self.delegates)
        self._lock = threading.RLock()
        self._ready: dict[str, ProgramSession] = {}
        self._latest: weakref.WeakValueDictionary[str, ProgramSession] = weakref.WeakValueDictionary()
        # The delegates that worked for a program, so that its next session does not try the failed ones again.
        self._settled: dict[str, tuple[Delegate, ...]] = {}
        self._skipped: dict[tuple[str, str], Skipped] = {}
        self._profile: tuple[str, Path] | None = None
        bundle.inspect_graphs()  # also those of a Bundle that somebody made without open_bundle
        if not all(preference.fallback for preference in self._preferences.values()):
            # A caller without fallback gets the error of a missing delegate now, not with the first prediction.
            for preference in self._preferences.values():
                preference.usable(_available(preference))

    def get(self, name: str) -> ProgramSession:
        """The session of program `name`; every call returns the same one.

        Raises RuntimeProgramError, or DelegateError.
        """
        # Predictions come here often, so a ready session is looked up without the lock, and again under it.
        session = self._ready.get(name)
        if session is None:
            with self._lock:
                session = self._ready.get(name)
                if session is None:
                    session = self._ready[name] = self.open(name)
        return session

    def open(self, name: str, initializers: Mapping[str, np.ndarray] | None = None) -> ProgramSession:
        """A new session; `initializers` replaces external data of the graph, by name. Raises as `get` does."""
        program = self._bundle.program(name)
        if self._preferences[program.kind].measured:
            return self._open_fastest(name, initializers)
        fallback = self._preferences[program.kind].fallback
        with self._lock:
            usable = self._settled.get(name)
            if usable is None:
                usable, missing = self._preferences[program.kind].usable(_available(self._preferences[program.kind]))
                self._skip(missing)
            failed: dict[str, str] = {}
            # From all usable delegates down to the CPU alone, until ONNX Runtime makes a session.
            for delegates in attempts(usable, fallback):
                session: ProgramSession
                try:
                    if any(delegate.whole for delegate in delegates):
                        session = self._open_whole(name, delegates[0], initializers)
                        used = {delegates[0].name}
                        break
                    session = self._open(name, delegates, initializers)
                except Refusal as refusal:
                    failed.setdefault(delegates[0].name, str(refusal))
                    continue
                except error_types() as error:
                    if not delegates:
                        raise program_error(name, "cannot be loaded", error) from None
                    for delegate in delegates:
                        failed.setdefault(delegate.name, one_line(error))
                    continue
                # A provider whose libraries are missing raises nothing: ONNX Runtime drops it.
                providers = session.native.get_providers()
                lost = [delegate.name for delegate in delegates if delegate.provider not in providers]
                for delegate_name in lost:
                    failed.setdefault(
                        delegate_name, "ONNX Runtime left it out: its libraries or its device are missing"
                    )
                if lost and not fallback:
                    continue
                used = {delegate.name for delegate in delegates if delegate.provider in providers}
                break
            else:
                reasons = "; ".join(f"{delegate}: {reason}" for delegate, reason in failed.items())
                raise DelegateError(
                    f"program {name!r} cannot be run by the delegates alone: {reasons}; add 'cpu' to fall back"
                )
            self._skip([Skipped(each, name, reason) for each, reason in failed.items() if each not in used])
            self._settled[name] = tuple(delegate for delegate in delegates if delegate.name in used)
            self._latest[name] = session
        self._check_names(session)
        return session

    def _open_fastest(self, name: str, initializers: Mapping[str, np.ndarray] | None) -> ProgramSession:
        """A session that measures, or that of the delegate that was fastest before."""
        program = self._bundle.program(name)
        key = self._bundle.manifest.files[program.file], self.threads
        profiled = self._profile is not None and self._profile[0] == name
        chosen = "cpu" if profiled else _FASTEST.get(key)
        opened: dict[str, ProgramSession] = {}
        with self._lock:
            usable, missing = self._preferences[program.kind].usable(())
            self._skip(missing)
            for delegate in usable if chosen != "cpu" else ():
                try:
                    opened[delegate.name] = self._open_whole(name, delegate, initializers)
                except Refusal as refusal:
                    self._skip([Skipped(delegate.name, name, str(refusal))])
            if chosen not in opened:
                try:
                    # First: what the others answer is compared with its answers.
                    opened = {"cpu": self._open(name, (), initializers), **opened}
                except error_types() as error:
                    raise program_error(name, "cannot be loaded", error) from None
            [first, *others] = opened.values()
            session = FastestSession(opened, partial(_FASTEST.__setitem__, key)) if others else first
            self._latest[name] = session
        self._check_names(first)
        return session

    def report(self) -> DelegateReport:
        """Which delegate has which node, for the programs that have a session."""
        with self._lock:
            placements = {name: session.placement() for name, session in sorted(self._latest.items())}
            later = [each for session in self._latest.values() for each in session.skipped()]
            return DelegateReport(placements, (*self._skipped.values(), *later))

    def profiled(self, name: str, folder: Path) -> Sessions:
        """New sessions for the same programs; that of `name` is profiled until `end_profile`."""
        other = Sessions(self._bundle, self.threads, self.delegates)
        other._profile = name, folder
        return other

    def end_profile(self) -> Path:
        """Write the profile to the folder, and return its file."""
        if self._profile is None or self._profile[0] not in self._latest:
            raise RuntimeProgramError("end_profile: no session was profiled; use Sessions.profiled(...) and run it")
        return Path(self._latest[self._profile[0]].native.end_profiling())

    def _open(self, name: str, delegates: Sequence[Delegate], initializers: Mapping[str, np.ndarray] | None) -> Session:
        ort = onnxruntime()
        kind = self._bundle.program(name).kind
        fallback = self._preferences[kind].fallback
        options = self._options(ort, kind, delegates, fallback)
        path = self._bundle.program_path(name)
        kernels = "" if delegates else self._register_kernels(name, path, options)
        if self._profile is not None and self._profile[0] == name:
            options.enable_profiling = True
            options.profile_file_prefix = str(self._profile[1] / "profile")
        keep: list[Any] = []
        if initializers:
            # Not add_initializer: with it, constant folding would use the graph's old values.
            keep = [ort.OrtValue.ortvalue_from_numpy(array) for array in initializers.values()]
            options.add_external_initializers(list(initializers), keep)
        providers = [(each.provider, self._provider_options(each)) for each in delegates]
        if fallback:
            providers.append(("CPUExecutionProvider", {}))
        # Without ONNX Runtime's own fallback, which prints to standard output and tries the CPU alone.
        open_native = ort.InferenceSession if delegates else open_exact
        native = open_native(str(path), options, providers=providers, enable_fallback=0)
        return Session(name, native, error_types(), keep, kernels)

    def _register_kernels(self, name: str, path: Path, options: Any) -> str:
        """The title of the kernel pack where it is there and the program calls for it; else the report says why not."""
        if not calls_kernels(path):
            return ""
        pack = kernel_pack()
        reason = pack.title
        if pack.library is not None:
            try:
                pack.register(options, self.threads)
            except error_types() as error:
                reason = f"{pack.title} cannot be registered: {one_line(error)}"
            else:
                return pack.title
        self._skip([Skipped("kernels", name, reason)])
        return ""

    def _open_whole(
        self, name: str, delegate: Delegate, initializers: Mapping[str, np.ndarray] | None
    ) -> ProgramSession:
        if self._profile is not None and self._profile[0] == name:
            raise RuntimeProgramError(
                f"profile: program {name!r} is run by {delegate.name}, and only ONNX Runtime's kernels are measured; "
                "load with delegates='cpu'"
            )
        path = self._bundle.program_path(name)
        open_program = ENGINES[delegate.name].load()
        session: ProgramSession = open_program(name, path, self.threads, delegate.options, initializers)
        return session

    def _options(self, ort: Any, kind: str, delegates: Sequence[Delegate], fallback: bool) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry(_RECORD_PLACEMENT, "1")
        # The inspection read the file as ONNX; its name or first bytes must not make ONNX Runtime read another format.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        if kind != "train":
            # Threads wait for work in a busy loop during a run, but not on to the next one: a device that predicts now
            # and then does not keep a core busy in between. Waking them makes each run a little longer: a step of
            # training, which the next one follows at once, by up to a fifth.
            options.add_session_config_entry("session.force_spinning_stop", "1")
        names = [delegate.name for delegate in delegates]
        if not names:
            # One arena for all sessions: programs run one after the other and can use the same memory.
            share_arena()
            options.add_session_config_entry("session.use_env_allocators", "1")
        if "xnnpack" in names:
            # It has threads of its own; ONNX Runtime's must not fight them for the cores.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if "dml" in names or kind == "train":
            # DirectML does not support memory patterns; training takes more memory with them, at the same speed.
            options.enable_mem_pattern = False
        if kind == "train":
            # A plan that gives a later value the memory of an earlier one holds that memory in between: a step then
            # keeps for the way back what it has just freed. Without the plan it takes at most a microsecond longer.
            options.enable_mem_reuse = False
        if not fallback:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        return options

    def _provider_options(self, delegate: Delegate) -> dict[str, str]:
        defaults = {"intra_op_num_threads": str(self.threads)} if delegate.name == "xnnpack" else {}
        return {**defaults, **delegate.options}

    def _skip(self, skipped: Sequence[Skipped]) -> None:
        for each in skipped:
            self._skipped.setdefault((each.program, each.delegate), each)

    def _check_names(self, session: ProgramSession) -> None:
        program = self._bundle.program(session.name)
        for side, ports, real in (
            ("inputs", program.inputs, session.inputs),
            ("outputs", program.outputs, session.outputs),
        ):
            declared = {port.name for port in ports}
            if declared != real:
                raise RuntimeProgramError(
                    f"program {session.name!r}: the manifest and the graph disagree about its {side}: "
                    f"only one of them has {sorted(declared ^ real)}; convert the bundle again"
                )


def _available(preference: Preference) -> Sequence[str]:
    """ONNX Runtime's providers, where the preference names any: an agent that waits does not import it."""
    return onnxruntime().get_available_providers() if preference.names_providers else ()


def import_engines(delegates: Delegates) -> None:
    """Import what would run graphs for these delegates now, and not with the first session."""
    error_types()
    for name in engines(delegates):
        with suppress(Refusal):  # the session of each program says why
            ENGINES[name].load()
