"""Quantizers: pure functions from matrices to codes, scales, zeros and low-rank factors.

Axes: N outputs (rows), K inputs, G groups of a row, R ranks. Leading axes (layers, experts) are
written `...`; every function works on each matrix by itself.
"""
