"""Evaluation: perplexity, fidelity to the exact model, and their texts."""
