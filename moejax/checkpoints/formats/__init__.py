"""Quantized checkpoints: the formats that users have, read without loss, and three written."""
