"""Bundles and weights, fetched by their digests; parts that the device has are not fetched again."""
