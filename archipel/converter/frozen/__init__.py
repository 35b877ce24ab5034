"""What of a train program is the same for an example in every step: found, proven, and cut off where it is small."""
