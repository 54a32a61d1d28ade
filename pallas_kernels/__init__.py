"""GPU kernels in Pallas, one folder per operation: plain arrays in, plain arrays out."""
