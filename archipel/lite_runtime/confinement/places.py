"""Which files a process needs that runs graphs: Python's and ONNX Runtime's own, and what delegates ask for."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import archipel
from archipel.lite_runtime.delegates import AUTO

PACKAGES = ("numpy", "onnxruntime", "msgspec", "cryptography", "safetensors")

_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/nix/store", "/gnu/store",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/os-release", "/etc/localtime",
    "/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system",
    "/dev/null", "/dev/zero", "/dev/urandom", "/dev/random",
)  # fmt: skip


class Needs(NamedTuple):
    """What a delegate needs beside that: files to read, folders to write, device files, environment variables."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


_GPU = ("/sys/bus/pci", "/sys/devices", "/sys/class", "/sys/module", "/proc/modules", "/proc/sys/vm")
_LIBRARIES = ("LD_LIBRARY_PATH",)

NEEDS: dict[str, Needs] = {
    "cuda": Needs(
        read=(*_GPU, "/proc/driver/nvidia", "/usr/local/cuda", "/etc/alternatives", "/usr/share/nvidia"),
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
"""Of the delegates that need more than the processor, from their documentation; docs/device.md says what was tried."""


START_PYTHON = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
at = next((index for index, entry in enumerate(sys.path) if entry.endswith("-packages")), len(sys.path))
sys.path[at:at] = sys.argv.pop(1).split(os.pathsep)
"""
"""How code for `python -P -c` begins that is started with no environment and `package_roots()` as its first argument.

These come before the installed packages: the parent may have found others. There is one thread until the process has
given up what it does not need: NumPy's library would start some when it is imported.
"""


def asked_for(delegates: Any) -> tuple[str, ...]:
    """The names of the delegates that a runtime may use: those that were named, and of "auto" those whose library this
    build of ONNX Runtime has."""
    choices = list(delegates.values()) if isinstance(delegates, Mapping) else [delegates]
    names = {each if isinstance(each, str) else each[0] for choice in choices for each in _listed(choice)}
    if "auto" in names or isinstance(delegates, Mapping):
        names |= {name for name in AUTO.get(sys.platform, ()) if _library(name)}
    return tuple(sorted(names - {"auto", "cpu"}))


def option_paths(delegates: Any) -> list[str]:
    """The files and folders that the owner named in options of delegates, such as a driver's library."""
    choices = list(delegates.values()) if isinstance(delegates, Mapping) else [delegates]
    pairs = [each for choice in choices for each in _listed(choice) if not isinstance(each, str)]
    values = [value for _, options in pairs for value in options.values() if isinstance(value, str)]
    return [value for value in values if os.path.isabs(value) and os.path.exists(value)]


def _listed(choice: Any) -> list[Any]:
    return [choice] if isinstance(choice, str) else list(choice)


def _library(name: str) -> bool:
    spec = importlib.util.find_spec("onnxruntime")
    folder = Path(spec.origin).parent / "capi" if spec is not None and spec.origin is not None else None
    return folder is not None and (folder / f"libonnxruntime_providers_{name}.so").exists()


def package_roots() -> str:
    """The folders that archipel and what it needs were imported from, for START_PYTHON in another process."""
    own, roots = str(Path(archipel.__file__).resolve().parent.parent), set()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.add(str(Path(spec.origin).parent.parent))
    # In this process's order: which of two versions is found depends on it.
    ordered = [entry for entry in sys.path if entry in roots]
    return os.pathsep.join(dict.fromkeys([own, *ordered, *sorted(roots - set(ordered))]))


def libraries() -> list[str]:
    """What Python and ONNX Runtime read of this installation and this system, to be read and not written."""
    own = Path(archipel.__file__).resolve().parent
    known = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # The folder that a checkout is imported from holds more than the package.
    path = {entry for entry in sys.path if entry and Path(entry).resolve() != own.parent}
    prefix = {str(Path(sys.base_prefix) / "lib"), str(Path(sys.prefix) / "pyvenv.cfg")}
    return sorted({*known, *path, *prefix, str(own), *_SYSTEM} - {""})


def needs_of(delegates: Iterable[str]) -> Needs:
    """All that these delegates need together."""
    found = [NEEDS[name] for name in delegates if name in NEEDS]
    return Needs(*(tuple(dict.fromkeys(each for need in found for each in need[at])) for at in range(4)))
