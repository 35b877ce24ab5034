"""Commands for the tasks, rounds and versions of models of a federation server."""
