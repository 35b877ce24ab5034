"""What the device keeps on disk: journal, keys, sealed files, and how they are erased."""
