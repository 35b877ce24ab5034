"""What a server tells of itself while it runs: measurements, log lines, traces."""
