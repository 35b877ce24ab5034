"""Training on the device: the order of the data, the steps, a fit with its checkpoints, and what comes of it."""
