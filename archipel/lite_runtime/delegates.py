"""Delegates: which of ONNX Runtime's execution providers run a program, in order of preference, and what became of it.

`delegates` is "auto", one name, a list of names or of (name, options), or a mapping from program kind to one of these:

    "auto"                              what the installed build of ONNX Runtime was made for, else the CPU
    ["coreml", "cpu"]                   Core ML where it can, the CPU for the rest
    [("qnn", {"backend_path": "libQnnHtp.so"}), "cpu"]
    {"predict": ["xnnpack", "cpu"]}     the kinds not named: "auto"

"cpu" in a list is the permission to fall back: with it a delegate that is missing or fails is left out, and the report
says why; without it that is an error, and so is a node that no named delegate takes. A list is for every program;
"auto" leaves everything but predict, evaluate and features on the CPU: those run rarely, or (training steps) take new
weights with every call, which accelerators do not expect.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple, get_args

from archipel.bundle.roles import ProgramKind
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

# Only providers of builds that someone installed on purpose. Core ML, NNAPI and XNNPACK come with every build for
# their platform, compute in other precision or other kernels, and are often slower on small models: by name only.
AUTO: dict[str, tuple[str, ...]] = {
    "linux": ("cuda", "migraphx", "cann", "openvino", "qnn"),
    "win32": ("cuda", "openvino", "qnn", "dml", "webgpu"),
    "darwin": ("webgpu",),
    "android": ("qnn",),
}
_AUTO_KINDS = ("predict", "evaluate", "features")


class Delegate(NamedTuple):
    """A provider by its name here, and its options as ONNX Runtime takes them."""

    name: str
    options: Mapping[str, str] = {}

    @property
    def provider(self) -> str:
        return PROVIDERS[self.name]


class Skipped(NamedTuple):
    """A delegate that does not run a program (`program` empty: no program), and why."""

    delegate: str
    program: str
    reason: str


@dataclass(frozen=True)
class Preference:
    """Delegates in order, without the CPU; `fallback` says whether the CPU may take what they do not."""

    delegates: tuple[Delegate, ...]
    fallback: bool

    def usable(self, available: Sequence[str]) -> tuple[tuple[Delegate, ...], list[Skipped]]:
        """Those whose provider is in this build of ONNX Runtime. Raises DelegateError where one may not be left out."""
        there, skipped = [], []
        for delegate in self.delegates:
            if delegate.provider in available:
                there.append(delegate)
                continue
            reason = f"not in this build of ONNX Runtime, which has {_known(available)}"
            if not self.fallback:
                raise DelegateError(
                    f"delegate {delegate.name!r}: {reason}; install a build that has it, or add 'cpu' to fall back"
                )
            skipped.append(Skipped(delegate.name, "", reason))
        return tuple(there), skipped


def attempts(delegates: Sequence[Delegate], fallback: bool) -> Iterator[tuple[Delegate, ...]]:
    """What to try until a session can be made: as many delegates as possible, in the order of preference."""
    for size in range(len(delegates), -1 if fallback else 0, -1):
        yield from combinations(delegates, size)


def preferences(delegates: Delegates) -> dict[str, Preference]:
    """The preference for each kind of program. Raises DelegateError for what cannot be understood."""
    kinds: Sequence[str] = get_args(ProgramKind)
    if isinstance(delegates, Mapping):
        for kind in delegates:
            if kind not in kinds:
                raise DelegateError(f"delegates: {kind!r} is not a kind of program; those are {', '.join(kinds)}")
        return {kind: _preference(delegates.get(kind, "auto"), kind) for kind in kinds}
    return {kind: _preference(delegates, kind) for kind in kinds}


def _preference(chosen: str | Sequence[Choice], kind: str) -> Preference:
    if isinstance(chosen, str) and chosen == "auto":
        sensible = AUTO.get(sys.platform, ()) if kind in _AUTO_KINDS else ()
        return Preference(tuple(map(Delegate, sensible)), fallback=True)
    choices = [chosen] if isinstance(chosen, str) else list(chosen)
    found = [_delegate(choice) for choice in choices]
    names = [delegate.name for delegate in found]
    if not names:
        raise DelegateError("delegates: the list is empty; name at least 'cpu'")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DelegateError(f"delegates: {twice[0]!r} is named twice")
    if "cpu" in names[:-1]:
        raise DelegateError("delegates: 'cpu' takes every node, so nothing is left for those after it; name it last")
    others = tuple(delegate for delegate in found if delegate.name != "cpu")
    return Preference(others, fallback="cpu" in names)


def _delegate(choice: Choice) -> Delegate:
    name, options = (choice, {}) if isinstance(choice, str) else _pair(choice)
    if name not in PROVIDERS:
        raise DelegateError(f"delegates: {name!r} is not known; choose from {', '.join(sorted(PROVIDERS))}")
    text = {key: str(int(value) if isinstance(value, bool) else value) for key, value in options.items()}
    return Delegate(name, text)


def _pair(choice: object) -> tuple[str, Mapping[str, object]]:
    match choice:
        case (str(name), Mapping() as options):
            return name, options
    raise DelegateError(f"delegates: expected a name or (name, options), got {choice!r}")


def _known(available: Sequence[str]) -> str:
    names = {provider: name for name, provider in PROVIDERS.items()}
    return ", ".join(sorted(names[provider] for provider in available if provider in names))


# --- what became of it ------------------------------------------------------------------------------------------------


class NodePlacement(NamedTuple):
    """Where ONNX Runtime put one node. The name is empty where the graph has none."""

    name: str
    op_type: str
    delegate: str


@dataclass(frozen=True)
class ProgramPlacement:
    """A program's session: the delegates it has, in order, and its nodes as they were given out.

    That happens before ONNX Runtime fuses nodes, so a profile can show fewer. `nodes` is None where this version of
    ONNX Runtime does not tell; a profile names the provider of each kernel in all versions.
    """

    program: str
    delegates: tuple[str, ...]
    nodes: tuple[NodePlacement, ...] | None

    def counts(self) -> dict[str, int]:
        """How many nodes each delegate has."""
        return dict(Counter(node.delegate for node in self.nodes or ()))


@dataclass(frozen=True)
class DelegateReport:
    """Which delegate runs which node, for every program that has a session, and which were left out and why."""

    programs: dict[str, ProgramPlacement]
    skipped: tuple[Skipped, ...] = field(default=())

    def table(self, nodes: bool = False) -> str:
        """Lines for people; with `nodes` one for each node too."""
        lines = []
        for name, placement in self.programs.items():
            counts = placement.counts()
            told = ", ".join(f"{counts.get(delegate, 0)} nodes on {delegate}" for delegate in placement.delegates)
            lines.append(f"{name}: {told if placement.nodes is not None else ', '.join(placement.delegates)}")
            if nodes:
                lines += [f"  {node.delegate:<10}{node.op_type:<24}{node.name}" for node in placement.nodes or ()]
        together: dict[tuple[str, str], list[str]] = {}
        for skipped in self.skipped:
            together.setdefault((skipped.program, skipped.reason), []).append(skipped.delegate)
        for (program, reason), delegates in together.items():
            lines.append(f"{program or 'all programs'}: not on {', '.join(delegates)}: {reason}")
        return "\n".join(lines)


def name_of(provider: str) -> str:
    """The delegate's name for one of ONNX Runtime's, or that one itself if there is none."""
    return next((name for name, other in PROVIDERS.items() if other == provider), provider)
