"""The settings of an edge server that say which server is above it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Upstream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table [upstream] of an edge server: the server above it, in whose rounds it takes part with the sums of its own
    devices (docs/edge.md). Relative paths start in the data folder."""

    population: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """The population of this server whose devices, or edge servers, work for the upstream's tasks."""
    cohort: Annotated[int, Meta(ge=2, le=4096)]
    """How many of them a round for the upstream takes."""
    min_cohort: Annotated[int, Meta(ge=0, le=4096)] = 0
    """With how few such a round may end; at least as many as the bundle's privacy policy asks for, which 0 stands for.
    """
    goal: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Such a round takes no more updates once so many are in, so that it waits for nobody who is gone; 0: it takes all.
    """
    token: str = "upstream.token"
    """File of the enrolment token with which this server joins the upstream (`archipel token --aggregator`)."""
    folder: str = "upstream"
    """Folder of this server's key, journal and cache as a member of the upstream."""
    address: str = ""
    """The upstream's URL; empty: the one in the token."""
    ca_file: str = ""
    """PEM file of the authorities that may certify the upstream's TLS certificate; empty: the system's."""
    allow_http: bool = False
    """Whether the URL may be plain http:// to another machine; anybody on the way can then read along."""
    max_bytes: Annotated[int, Meta(ge=1)] = 1 << 30
    """The largest bundle, weights or upload."""

    def lines(self) -> list[str]:
        """The table in server.toml, without what has its default."""
        goal = [f"goal = {self.goal}"] if self.goal else []
        return ["", "[upstream]", f'population = "{self.population}"', f"cohort = {self.cohort}", *goal]
