"""The command `convert`: its options, what it lists, and what it prints."""
