"""Stored matrices, and products with them."""
