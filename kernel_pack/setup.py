"""Builds the library into the package; the wheel is for any Python 3 on this platform."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from build_library import NAME, build


class BuildLibrary(build_py):
    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib) / "archipel_kernels"
        folder.mkdir(parents=True, exist_ok=True)
        build(folder / NAME)


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class Native(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildLibrary, "bdist_wheel": PlatformWheel}, distclass=Native)
