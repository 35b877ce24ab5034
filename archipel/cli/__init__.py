"""The command line: one file per command or group; thin: parse, call, print."""
