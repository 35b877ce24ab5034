"""Training on the device: steps, phases, fits with checkpoints, and their results."""
