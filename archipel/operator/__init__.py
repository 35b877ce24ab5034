"""The operator's Python API: typed calls to a server over HTTP."""
