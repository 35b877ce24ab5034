"""The compiled kernel pack."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

import pytest

from archipel.lite_runtime.engines.kernels import KernelPack, kernel_pack
from tests.support.kernel_pack import build_package


@pytest.fixture(scope="session")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelPack]:
    folder = tmp_path_factory.mktemp("kernel_pack")
    build_package(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    sys.modules.pop("archipel_kernels", None)
    kernel_pack.cache_clear()
    found = kernel_pack()
    assert found.library == str(folder / "archipel_kernels" / "libarchipel_kernels.so"), found
    yield found
    sys.path.remove(str(folder))
    sys.modules.pop("archipel_kernels", None)
    kernel_pack.cache_clear()
