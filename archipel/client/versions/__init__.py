"""The models that a device runs: offered versions, their comparison, and their adoption."""
