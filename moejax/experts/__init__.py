"""Experts that do not fit the device: what is where, what moves, and what it costs in bytes."""
