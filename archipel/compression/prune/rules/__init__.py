"""Channels through operators, one file per operator family; `table.RULES` lists them."""
