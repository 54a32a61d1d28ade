"""Stored matrices, and products with them."""

LOW_RANK = ".low_rank"  # ends the names under which low-rank factors are counted by their bytes
