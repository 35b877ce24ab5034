"""The web application: who may call what, limits, and one JSON shape for every error. Routes are in api/."""
