"""Compiles the operators with g++ against oneDNN's wheels, which have to be installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NAME = "libarchipel_kernels.so"


def build(target: Path) -> None:
    """Write the library to `target`. Raises PackageNotFoundError without oneDNN, CalledProcessError if g++ fails."""
    include = _installed("onednn-devel-cpu-gomp", "dnnl.hpp").parent
    onednn = _installed("onednn-cpu-gomp", "libdnnl.so.3")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-fopenmp"]
    objects = [target.with_suffix(f".{source.stem}.o") for source in sorted(SOURCES.glob("*.cpp"))]
    compilers = [
        subprocess.Popen(
            ["g++", *flags, "-c", str(SOURCES / f"{made.suffixes[-2][1:]}.cpp"), "-I", str(include), "-o", str(made)]
        )
        for made in objects
    ]
    for compiler in compilers:
        if compiler.wait():
            raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
    # oneDNN is found by its name: archipel_kernels loads it before.
    subprocess.run(["g++", *flags, "-shared", *map(str, objects), str(onednn), "-o", str(target)], check=True)
    for made in objects:
        made.unlink()


def _installed(distribution: str, name: str) -> Path:
    for file in files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"{distribution} has no file {name}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
