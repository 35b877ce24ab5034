"""What a task among edge servers may ask for; what does not go together yet is refused by name."""

from __future__ import annotations

import msgspec

from archipel.bundle import Manifest
from archipel.errors import ServerError
from archipel.protocol.messages import over_neighbours
from archipel.protocol.operator.tasks import TaskRequest
from archipel.protocol.policy import policy_of_members

SITE_SECONDS = 900.0
"""How long phase advertising is by default, for each level: in it a site carries out a round of its own."""


def fill_in_sites(request: TaskRequest, manifest: Manifest) -> TaskRequest:
    """The request with `site` and the deadline of its members' own rounds filled in; as it is for a task of devices.

    Raises ServerError or PolicyError for what rounds among edge servers cannot do.
    """
    if not request.levels:
        if request.site is not None:
            raise ServerError("site: belongs to tasks among edge servers; set levels, or leave it out")
        return request
    refused = [
        ("privacy", request.privacy != "secure", "secure rounds only, or each site would be seen by itself"),
        ("mode", request.mode == "asynchronous", "rounds that begin together"),
        ("secure_groups", bool(request.secure_groups), "one sum of all sites"),
        ("aggregation", request.aggregation.robust, "the mean: a rule would take whole sites for single devices"),
        (
            "count_adoption",
            request.count_adoption,
            "no adoption; it is counted at each edge server, which makes offers",
        ),
        ("max_contributions", request.max_contributions is not None, "a limit of sites, not of devices; leave it out"),
        ("differential_privacy", request.differential_privacy.on_devices, "noise of the root; take mechanism central"),
        ("differential_privacy", request.differential_privacy.is_correlated, "fresh noise; take mechanism central"),
        ("protocol", over_neighbours(request.protocol), "a complete graph of sites"),
    ]
    for name, wrong, instead in refused:
        if wrong:
            raise ServerError(f"{name}: tasks among edge servers (levels {request.levels}) have {instead}")
    policy_of_members(manifest.privacy, request.levels)
    sites = manifest.privacy.aggregators
    assert sites is not None
    return msgspec.structs.replace(
        request,
        site=request.site or sites.max_site_cohort,
        deadlines={"advertising": SITE_SECONDS * request.levels, **request.deadlines},
    )
