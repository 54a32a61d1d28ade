"""A numpy interpreter of the Mosaic kernels for few rows, for tests on a CPU."""
