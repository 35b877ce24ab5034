"""Trainings whose devices add noise to their vectors themselves, before they mask and send them."""
