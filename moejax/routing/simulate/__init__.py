"""Caches of experts without weights: a trace through many settings at once, and what it costs.

Axes: S steps, M sparse layers, E experts of a layer, K settings, side by side on the last axis.
"""
