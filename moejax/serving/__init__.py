"""The server behind `python -m moejax.serve`; heavy imports are in `moejax.serving.server`."""
