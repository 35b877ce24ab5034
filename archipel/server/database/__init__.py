"""Engine, tables and migrations."""
