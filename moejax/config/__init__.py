"""Configurations of the commands: dataclasses, read from files and flags."""
