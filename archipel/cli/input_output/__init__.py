"""What commands read and write: arrays in files, a server's answers, tables."""
