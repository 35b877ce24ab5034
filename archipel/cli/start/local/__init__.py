"""Federations whose server and devices are processes of one machine, in one folder."""
