"""Two model slots, as for system updates of phones: one for a new model on trial, one for the last good model."""
