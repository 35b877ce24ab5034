"""The first commands: what is installed, and a whole federation to look at."""
