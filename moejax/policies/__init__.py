"""Policies: what runs, at which precision, decided by pure functions over a carried state."""
