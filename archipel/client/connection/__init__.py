"""The connection to the server: HTTP, sessions, the device's identity and its keys."""
