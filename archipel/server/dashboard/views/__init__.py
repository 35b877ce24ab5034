"""The dashboard's pages, by what they are about."""
