"""`archipel up`: a federation of one's own model and data on one machine."""
