"""Whether the device may work now, and on what: the owner's conditions, limits and pause."""
