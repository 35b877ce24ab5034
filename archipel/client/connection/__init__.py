"""The connection to the server: HTTP, sessions, the device's identity, key rotation and revocations."""
