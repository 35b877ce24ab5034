"""Delegates: which of ONNX Runtime's execution providers run a program, in order of preference, and a report on them.

`delegates` is "auto", one name, a list of names or of (name, options), or a mapping from program kind to one of these:

    "auto"                              the providers that the installed build is for, and the CPU
    ["coreml", "cpu"]                   Core ML where it can, the CPU for the rest
    [("qnn", {"backend_path": "libQnnHtp.so"}), "cpu"]
    {"predict": ["xnnpack", "cpu"]}     the kinds not named: "auto"
    "fastest"                           what is fastest here, by measurement: the CPU or OpenVINO
    "torch:cuda:1"                      an engine (archipel/engine_registry.py), on a device of its own

"cpu" in a list permits to fall back: with it a delegate that is missing or fails is left out, and the report says why;
without it that is an error, and so is a node that no named delegate takes. A list is for every kind of program. "auto"
uses delegates for predict and features only: other programs run rarely, or (training steps) take new weights
with every call, which accelerators do not expect.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import NamedTuple, get_args

from archipel.bundle.graphs.operators import KERNELS_DOMAIN
from archipel.bundle.roles import ProgramKind
from archipel.engine_registry import ENGINES
from archipel.errors import DelegateError

Choice = str | tuple[str, Mapping[str, object]]
Delegates = str | Sequence[Choice] | Mapping[str, str | Sequence[Choice]]

PROVIDERS: dict[str, str] = {
    "acl": "ACLExecutionProvider",
    "cann": "CANNExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "dnnl": "DnnlExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "nnapi": "NnapiExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "rknpu": "RknpuExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "vitisai": "VitisAIExecutionProvider",
    "vsinpu": "VSINPUExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "webnn": "WebNNExecutionProvider",
    "xnnpack": "XnnpackExecutionProvider",
}
"""ONNX Runtime's name for each delegate. Azure is not among them: it sends the examples to a remote service."""

MEASURED_ENGINES = ("openvino",)
"""The engines that "fastest" measures."""

MEASURED = ("predict", "features", "train")
"""Kinds of programs that run often enough for "fastest" to measure them; the others run on the CPU."""

# Only providers of builds that someone installed on purpose. Core ML, NNAPI and XNNPACK come with every build for
# their platform, compute in other precision or other kernels, and are often slower on small models: by name only.
AUTO: dict[str, tuple[str, ...]] = {
    "linux": ("cuda", "migraphx", "cann", "openvino", "qnn"),
    "win32": ("cuda", "openvino", "qnn", "dml", "webgpu"),
    "darwin": ("webgpu",),
    "android": ("qnn",),
}
_AUTO_KINDS = ("predict", "features")


class Delegate(NamedTuple):
    """A provider by its name in this package, and its options as ONNX Runtime takes them.

    `whole`: an engine of its own, beside ONNX Runtime, that takes a program as a whole or not at all.
    """

    name: str
    options: Mapping[str, str] = {}
    whole: bool = False

    @property
    def provider(self) -> str:
        """ONNX Runtime's name; "" for an engine that is none of its providers."""
        return PROVIDERS.get(self.name, "")


class Skipped(NamedTuple):
    """A delegate that does not run `program` ("": any program), and the reason."""

    delegate: str
    program: str
    reason: str


@dataclass(frozen=True)
class Preference:
    """Delegates in order, without the CPU; `fallback` says whether the CPU may run the other nodes.

    `automatic`: nobody has named them, so they are providers of the installed ONNX Runtime only. `measured`: each
    engine and the CPU run a program, and the fastest keeps it.
    """

    delegates: tuple[Delegate, ...]
    fallback: bool
    automatic: bool = False
    measured: bool = False

    def usable(self, available: Sequence[str]) -> tuple[tuple[Delegate, ...], list[Skipped]]:
        """The delegates that this build of ONNX Runtime has, and the others.

        Without fallback, raises DelegateError, or MissingExtraError for an engine that is not installed.
        """
        present, skipped = [], []
        for delegate in self.delegates:
            engine = None if self.automatic else ENGINES.get(delegate.name)
            if engine is not None and engine.installed:
                present.append(delegate._replace(whole=True))
                continue
            if delegate.provider in available:
                present.append(delegate)
                continue
            reason = f"not in this build of ONNX Runtime, which has {_known_names(available)}"
            remedy = "install a build that has it"
            if engine is not None:
                reason = f"the package {engine.package} is not installed"
                remedy = f"install it with: pip install 'archipel[{engine.extra}]'"
                if not self.fallback and not delegate.provider:
                    engine.require()
            if not self.fallback:
                raise DelegateError(f"delegate {delegate.name!r}: {reason}; {remedy}, or add 'cpu' to fall back")
            if engine is not None:
                reason = f"{reason}; {remedy}"
            skipped.append(Skipped(delegate.name, "", reason))
        return tuple(present), skipped

    @property
    def names_providers(self) -> bool:
        """Whether ONNX Runtime has to say what it has: delegates that are no installed engines."""
        return len(self.engines()) < len(self.delegates)

    def engines(self) -> set[str]:
        """The installed engines among the delegates."""
        named = () if self.automatic else self.delegates
        return {each.name for each in named if each.name in ENGINES and ENGINES[each.name].installed}


def attempts(delegates: Sequence[Delegate], fallback: bool) -> Iterator[tuple[Delegate, ...]]:
    """Sets of delegates to try until a session can be made: the largest first, then in the order of preference.

    An engine that takes whole programs is tried alone, in its place.
    """
    for whole, group in groupby(delegates, key=lambda delegate: delegate.whole):
        together = tuple(group)
        # A few delegates at most, so 2**n sets are few.
        for size in (1,) if whole else range(len(together), 0, -1):
            yield from combinations(together, size)
    # None, which is the CPU alone, only with fallback.
    if fallback:
        yield ()


def preferences(delegates: Delegates) -> dict[str, Preference]:
    """The preference for each kind of program. Raises DelegateError for a choice that is invalid."""
    kinds: Sequence[str] = get_args(ProgramKind)
    if isinstance(delegates, Mapping):
        for kind in delegates:
            if kind not in kinds:
                raise DelegateError(f"delegates: {kind!r} is not a kind of program; those are {', '.join(kinds)}")
        return {kind: _preference(delegates.get(kind, "auto"), kind) for kind in kinds}
    return {kind: _preference(delegates, kind) for kind in kinds}


def engines(delegates: Delegates) -> set[str]:
    """The installed engines beside ONNX Runtime that these delegates name. Raises as `preferences`."""
    return {name for preference in preferences(delegates).values() for name in preference.engines()}


def _preference(chosen: str | Sequence[Choice], kind: str) -> Preference:
    if isinstance(chosen, str) and chosen == "auto":
        automatic = AUTO.get(sys.platform, ()) if kind in _AUTO_KINDS else ()
        return Preference(tuple(map(Delegate, automatic)), fallback=True, automatic=True)
    choices = [chosen] if isinstance(chosen, str) else list(chosen)
    if choices == ["fastest"]:
        measured = kind in MEASURED
        return Preference(tuple(map(Delegate, MEASURED_ENGINES)) if measured else (), fallback=True, measured=measured)
    named = [_delegate(choice) for choice in choices]
    names = [delegate.name for delegate in named]
    if not names:
        raise DelegateError("delegates: the list is empty; name at least 'cpu'")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DelegateError(f"delegates: {twice[0]!r} is named twice")
    # An error, because a caller who names a delegate expects it to run something.
    if "cpu" in names[:-1]:
        raise DelegateError("delegates: 'cpu' takes every node, so nothing is left for those after it; name it last")
    others = tuple(delegate for delegate in named if delegate.name != "cpu")
    return Preference(others, fallback="cpu" in names)


def _delegate(choice: Choice) -> Delegate:
    name, options = (choice, {}) if isinstance(choice, str) else _pair(choice)
    name, device = split_device(name)
    known = sorted({*PROVIDERS, *ENGINES})
    if name not in known:
        raise DelegateError(f"delegates: {name!r} is not known; choose from {', '.join(known)}")
    if device:
        if name not in ENGINES:
            raise DelegateError(f"delegates: {name!r} takes no device in its name; give it options as (name, options)")
        options = {"device": device, **options}
    # ONNX Runtime takes strings only, with 0 and 1 for booleans.
    text = {key: str(int(value) if isinstance(value, bool) else value) for key, value in options.items()}
    return Delegate(name, text)


def split_device(name: str) -> tuple[str, str]:
    """("torch", "cuda:1") of "torch:cuda:1"; ("torch", "") of "torch"."""
    name, _, device = name.partition(":")
    return name, device


def _pair(choice: object) -> tuple[str, Mapping[str, object]]:
    match choice:
        case (str(name), Mapping() as options):
            return name, options
    raise DelegateError(f"delegates: expected a name or (name, options), got {choice!r}")


def _known_names(available: Sequence[str]) -> str:
    names = {provider: name for name, provider in PROVIDERS.items()}
    return ", ".join(sorted(names[provider] for provider in available if provider in names))


# --- the report -------------------------------------------------------------------------------------------------------


class NodePlacement(NamedTuple):
    """Where ONNX Runtime put one node. The name is empty where the graph has none."""

    name: str
    op_type: str
    delegate: str


@dataclass(frozen=True)
class ProgramPlacement:
    """A program's session: its delegates in order, and the nodes that each of them got.

    ONNX Runtime fuses nodes later, so a profile can show fewer. `nodes` is None if this version of ONNX Runtime does
    not report them; a profile names the provider of each kernel in all versions. `kernels` is the name and version of
    the kernel pack whose operators run in place of the program's functions, "" without.
    """

    program: str
    delegates: tuple[str, ...]
    nodes: tuple[NodePlacement, ...] | None
    kernels: str = ""

    def native_nodes(self) -> int:
        """How many nodes the kernel pack runs."""
        return sum(node.op_type.startswith(f"{KERNELS_DOMAIN}.") for node in self.nodes or ())

    def counts(self) -> dict[str, int]:
        """How many nodes each delegate has."""
        return dict(Counter(node.delegate for node in self.nodes or ()))


@dataclass(frozen=True)
class DelegateReport:
    """Which delegate runs which node of every program with a session, and why other delegates were left out."""

    programs: dict[str, ProgramPlacement]
    skipped: tuple[Skipped, ...] = field(default=())

    def table(self, nodes: bool = False) -> str:
        """The report as text; with `nodes` also a line for each node."""
        lines = []
        for name, placement in self.programs.items():
            counts = placement.counts()
            summary = ", ".join(f"{counts.get(delegate, 0)} nodes on {delegate}" for delegate in placement.delegates)
            lines.append(f"{name}: {summary if placement.nodes is not None else ', '.join(placement.delegates)}")
            if placement.kernels:
                lines[-1] += f", of them {placement.native_nodes()} by {placement.kernels}"
            if nodes:
                lines += [f"  {node.delegate:<10}{node.op_type:<24}{node.name}" for node in placement.nodes or ()]
        together: dict[tuple[str, str], list[str]] = {}
        for skipped in self.skipped:
            together.setdefault((skipped.program, skipped.reason), []).append(skipped.delegate)
        for (program, reason), delegates in together.items():
            lines.append(f"{program or 'all programs'}: not on {', '.join(delegates)}: {reason}")
        return "\n".join(lines)


def name_of(provider: str) -> str:
    """The delegate's name for a provider of ONNX Runtime, or the provider's own name if it is no delegate here."""
    return next((name for name, other in PROVIDERS.items() if other == provider), provider)
