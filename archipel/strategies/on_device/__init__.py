"""Strategies whose news is on the device: what it trains, and what a step adds to the gradient."""
