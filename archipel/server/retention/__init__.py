"""Retention: old versions' weights are deleted, as far as nothing needs them."""
