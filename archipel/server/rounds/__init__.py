"""From a task to its results: opening a round, its state machine, what devices send, and what becomes of the sum."""
