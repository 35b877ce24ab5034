"""`archipel train`."""
