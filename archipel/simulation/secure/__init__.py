"""Secure rounds of a simulation: which protocol they take, and rounds over neighbours that are really carried out."""
