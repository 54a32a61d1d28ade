"""Checkpoints: Hugging Face directories in and out, and Orbax directories of the loaded form."""

from moejax.checkpoints.load import load_weights as load_weights
from moejax.checkpoints.load import stored_dtype as stored_dtype
