"""The example store: what a device has learned from and may learn from again, encrypted on its disk."""
