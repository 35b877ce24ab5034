"""What make_vectors.py puts into the files of vectors/protocol."""
