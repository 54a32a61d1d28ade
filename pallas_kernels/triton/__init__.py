"""Parts of the Triton kernels: unpacking codes, products, low-rank terms."""
