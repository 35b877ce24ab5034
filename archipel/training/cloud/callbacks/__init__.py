"""What happens around epochs and batches: hooks, and those that every training has."""
