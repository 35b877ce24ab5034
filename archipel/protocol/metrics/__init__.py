"""Metrics that devices send: those of training rounds, of evaluations, and how they are spread over devices."""
