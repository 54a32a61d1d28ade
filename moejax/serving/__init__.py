"""What `python -m moejax.serve` is made of; the heavy imports are in `moejax.serving.server`."""
