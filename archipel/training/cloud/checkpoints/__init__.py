"""The checkpoint of a training: its file, what it holds, and the random generators."""
