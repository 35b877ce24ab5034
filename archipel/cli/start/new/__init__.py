"""`archipel new`: a folder to begin with, for one's own data and model."""
