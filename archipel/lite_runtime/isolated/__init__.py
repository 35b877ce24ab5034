"""A runtime whose graphs run in a child process with limits that the system enforces."""
