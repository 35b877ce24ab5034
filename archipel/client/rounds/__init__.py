"""Taking part in a round, from the plan to its end."""
