"""The models that a device runs: which versions it is offered, how they compare, and which it adopts."""
