"""The command line: a folder for each group of `archipel --help`, and in it a file for each command.

A command parses its arguments, calls the package and prints.
"""
