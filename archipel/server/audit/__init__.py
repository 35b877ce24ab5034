"""The audit log: who did what to what, in entries that hold each other's hashes."""
