"""Strategies whose devices do what those of federated averaging do, and whose server is an optimizer of its own."""
