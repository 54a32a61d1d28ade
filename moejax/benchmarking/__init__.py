"""What `moejax.benchmark` measures with: requests, random models of real shapes, routing, runs."""
