"""Commands for data: convert, inspect, stats."""
