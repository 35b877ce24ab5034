"""Data sets as they were published: the digits in the package, and readers of others from their own files."""
