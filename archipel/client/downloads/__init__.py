"""Bundles and weights: fetched by their digests, in parts where some are here already, and checked for their origin."""
