"""Where the workers of a simulation are: processes of this machine, or actors of a Ray cluster."""
