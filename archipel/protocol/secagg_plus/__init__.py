"""Secure aggregation over few neighbours (Bell et al. 2020), for cohorts of thousands."""
