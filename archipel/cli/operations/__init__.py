"""Commands that set up a server and say who may use it."""
