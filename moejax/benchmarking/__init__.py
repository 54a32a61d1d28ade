"""Requests, random models of real shapes, routing and timed runs of `moejax.benchmark`."""
