"""One module a transformation; benchmarks/transformations.py runs them."""
