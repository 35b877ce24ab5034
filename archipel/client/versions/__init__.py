"""The models that a device runs: fetching, checking, comparing and adopting the versions that it is offered."""
