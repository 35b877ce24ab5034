"""Lets the kernel restrict a process that runs the graphs of others: its files, sockets and programs."""

from archipel.lite_runtime.confinement.holding import Holding, folder_modes, holdings, trial
from archipel.lite_runtime.confinement.landlock import landlock_version, restrict_files
from archipel.lite_runtime.confinement.places import (
    START_PYTHON,
    asked_for,
    libraries,
    needs_of,
    option_paths,
    package_roots,
)
from archipel.lite_runtime.confinement.restricting import Confinement, kernel_offers, restrict
from archipel.lite_runtime.confinement.scratch import Scratch, scratch_root
from archipel.lite_runtime.confinement.seccomp import restrict_calls, seccomp_there

__all__ = [
    "START_PYTHON",
    "Confinement",
    "Holding",
    "Scratch",
    "asked_for",
    "folder_modes",
    "holdings",
    "kernel_offers",
    "landlock_version",
    "libraries",
    "needs_of",
    "option_paths",
    "package_roots",
    "restrict",
    "restrict_calls",
    "restrict_files",
    "scratch_root",
    "seccomp_there",
    "trial",
]
