"""The device's memory on disk: its journal, keys, sealed files and records, and how they are erased."""
