"""Programs of bundles on PyTorch: as an engine of the runtime, in step runners, and for many clients at once."""
