"""Secure groups of a round: who is in which, and their sums."""
