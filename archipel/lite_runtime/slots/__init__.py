"""Two model slots, as phones have for system updates: a new model is tried, and the old one stays to return to."""
