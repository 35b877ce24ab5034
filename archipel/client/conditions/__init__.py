"""The owner's conditions, limits and pause: whether the device may work now, and in which rounds."""
