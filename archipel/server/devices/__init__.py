"""Which devices may take part: targeting, pace, revocation, faults, and the search for whoever spoils rounds."""
