"""Expert residency on a limited device: slots, transfers and their bytes."""
