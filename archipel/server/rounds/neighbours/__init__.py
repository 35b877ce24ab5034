"""The server's half of secure rounds over few neighbours of each device (archipel.protocol.secagg_plus)."""
