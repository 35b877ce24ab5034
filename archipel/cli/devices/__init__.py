"""Commands that run and train a bundle on this machine, and the agent of a device."""
