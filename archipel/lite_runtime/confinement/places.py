"""The files that a process needs to run graphs: those of Python, of ONNX Runtime, and of delegates."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import archipel
from archipel.lite_runtime.engines.delegates import AUTO, split_device

PACKAGES = (
    "numpy", "onnxruntime", "msgspec", "cryptography", "safetensors", "archipel_kernels", "openvino",
    "torch", "onnx", "onnx_ir", "onnxscript",
)  # fmt: skip

_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/os-release", "/etc/localtime",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip


class Needs(NamedTuple):
    """What a delegate needs beyond that: files to read, folders to write, device files, environment variables."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_GPU = ("/sys/bus/pci", "/sys/devices", "/sys/class", "/sys/module", "/proc/modules", "/proc/sys/vm")
_LIBRARIES = ("LD_LIBRARY_PATH",)

NEEDS: dict[str, Needs] = {
    "cuda": Needs(
        read=(
            *_GPU,
            "/proc/driver/nvidia",
            "/usr/local/cuda",
            "/etc/alternatives",
            "/usr/share/nvidia",
        ),
        devices=("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", *(f"/dev/nvidia{i}" for i in range(16))),
        environment=(*_LIBRARIES, "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    ),
    "migraphx": Needs(
        read=(*_GPU, "/opt/rocm"),
        devices=("/dev/kfd", "/dev/dri"),
        environment=(*_LIBRARIES, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    ),
    "openvino": Needs(read=(*_GPU, "/opt/intel"), devices=("/dev/dri", "/dev/accel"), environment=_LIBRARIES),
    "qnn": Needs(read=_GPU, devices=("/dev/kgsl-3d0", "/dev/fastrpc-cdsp"), environment=_LIBRARIES),
    "webgpu": Needs(read=(*_GPU, "/usr/share/vulkan", "/etc/vulkan"), devices=("/dev/dri",), environment=_LIBRARIES),
    "cann": Needs(read=(*_GPU, "/usr/local/Ascend"), devices=("/dev/davinci0",), environment=_LIBRARIES),
}
NEEDS["tensorrt"] = NEEDS["cuda"]
NEEDS["torch"] = Needs(*(tuple(dict.fromkeys((*a, *b))) for a, b in zip(NEEDS["cuda"], NEEDS["migraphx"])))
NEEDS["torch:cpu"] = Needs()
"""For delegates that need more than the processor, from their documentation; docs/device.md says which were tried."""


START_PYTHON = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
at = next((index for index, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
sys.path[at:at] = sys.argv.pop(1).split(os.pathsep)
"""
"""The beginning of code for `python -P -c`, run with an empty environment and `package_roots()` as first argument.

The roots go before the installed packages, so that the child imports the versions that its parent has. OpenBLAS gets
one thread, because Landlock restricts only the calling thread, and NumPy's import would start others.
"""


def asked_for(delegates: Any) -> tuple[str, ...]:
    """The names of the delegates that a runtime may use: those named, and for "auto" those with a library installed."""
    choices = list(delegates.values()) if isinstance(delegates, Mapping) else [delegates]
    # In a mapping, program kinds that are not named are "auto".
    names = {_needing(each) for choice in choices for each in _as_list(choice)}
    if "auto" in names or isinstance(delegates, Mapping):
        names |= {name for name in AUTO.get(sys.platform, ()) if _has_library(name)}
    return tuple(sorted(names - {"auto", "cpu"}))


def _needing(choice: Any) -> str:
    """The name in NEEDS."""
    named, options = (choice, {}) if isinstance(choice, str) else choice
    name, device = split_device(named)
    return f"{name}:cpu" if name == "torch" and (device or options.get("device")) == "cpu" else name


def option_paths(delegates: Any) -> list[str]:
    """The files and folders in the owner's options of delegates, such as a driver's library."""
    choices = list(delegates.values()) if isinstance(delegates, Mapping) else [delegates]
    pairs = [each for choice in choices for each in _as_list(choice) if not isinstance(each, str)]
    # Any string that is an absolute path of something that exists: the options' names differ from delegate to delegate.
    values = [value for _, options in pairs for value in options.values() if isinstance(value, str)]
    return [value for value in values if os.path.isabs(value) and os.path.exists(value)]


def _as_list(choice: Any) -> list[Any]:
    return [choice] if isinstance(choice, str) else list(choice)


def _has_library(name: str) -> bool:
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin).parent / "capi" if spec is not None and spec.origin is not None else None
    return folder is not None and (folder / f"libonnxruntime_providers_{name}.so").exists()


def package_roots() -> str:
    """The folders that archipel and its dependencies were imported from, for START_PYTHON in another process."""
    own, roots = str(Path(archipel.__file__).resolve().parent.parent), set()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.add(str(Path(spec.origin).parent.parent))
    # In the order of sys.path, which decides between two versions of a package.
    ordered = [entry for entry in sys.path if entry in roots]
    return os.pathsep.join(dict.fromkeys([own, *ordered, *sorted(roots - set(ordered))]))


def libraries() -> list[str]:
    """The files and folders of this installation and system that Python and ONNX Runtime read."""
    own = Path(archipel.__file__).resolve().parent
    known = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # Not the parent folder of a checkout: it holds more than the package.
    path = {entry for entry in sys.path if entry and Path(entry).resolve() != own.parent}
    # Libraries that wheels bring lie beside the packages of a virtual environment, too.
    prefix = {str(Path(root) / "lib") for root in (sys.base_prefix, sys.prefix)} | {
        str(Path(sys.prefix) / "pyvenv.cfg")
    }
    return sorted({*known, *path, *prefix, str(own), *_SYSTEM} - {""})


def needs_of(delegates: Iterable[str]) -> Needs:
    """The needs of these delegates together."""
    needs = [NEEDS[name] for name in delegates if name in NEEDS]
    return Needs(*(tuple(dict.fromkeys(each for need in needs for each in need[at])) for at in range(4)))
