"""Simulated caches: a trace replayed through many settings at once, and its cost.

Axes: S steps, M sparse layers, E experts of a layer, K settings, side by side on the last axis.
"""
