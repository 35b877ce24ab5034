"""The example store: the examples that a device learns from, encrypted on its disk."""
