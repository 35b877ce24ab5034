"""Models, their versions, which devices are offered which, and rollouts with their gates."""
