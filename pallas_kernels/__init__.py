"""GPU kernels in Pallas, one folder an operation: plain arrays in, plain arrays out."""
