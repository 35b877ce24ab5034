"""What a federation.toml has in it, part by part."""
