"""A shell to run the commands of pages in."""

from __future__ import annotations

from tests.support.fixtures.shell import shell  # noqa: F401
