"""Compiles the operators with g++ against oneDNN's wheels, which have to be installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
NAME = "libarchipel_kernels.so"


def build(target: Path, *more: str) -> None:
    """Write the library to `target`; `more` are g++'s options for all parts, such as -fsanitize=address.

    Raises PackageNotFoundError without oneDNN, CalledProcessError if g++ fails.
    """
    include = _installed("onednn-devel-cpu-gomp", "dnnl.hpp").parent
    onednn = _installed("onednn-cpu-gomp", "libdnnl.so.3")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-Wno-psabi", *more]
    compilers, objects = [], []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(str(target.with_name(f"{source.stem}.o")))
        # vector_loops_v3.cpp: for processors of the level x86-64-v3.
        level = [f"-march=x86-64-{source.stem[-2:]}"] if source.stem.startswith("vector_loops_v") else []
        command = ["g++", *flags, *level, "-c", str(source), "-I", str(include), "-o", objects[-1]]
        compilers.append(subprocess.Popen(command))
    for compiler in compilers:
        if compiler.wait():
            raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
    # oneDNN is found by its name: archipel_kernels loads it before.
    subprocess.run(["g++", *flags, "-shared", *objects, str(onednn), "-o", str(target)], check=True)
    for made in objects:
        Path(made).unlink()


def _installed(distribution: str, name: str) -> Path:
    for file in files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate())).resolve()
    raise FileNotFoundError(f"{distribution} has no file {name}")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
