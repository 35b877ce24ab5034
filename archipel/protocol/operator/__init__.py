"""What people and scripts exchange with a server: tasks, devices, models and rollouts, as msgspec structs."""
