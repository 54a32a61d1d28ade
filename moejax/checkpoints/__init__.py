"""Checkpoints: Hugging Face directories in and out, and Orbax directories of the loaded form."""

from moejax.checkpoints.open import Checkpoint as Checkpoint
from moejax.checkpoints.open import open_checkpoint as open_checkpoint
from moejax.checkpoints.orbax_directory import load_orbax as load_orbax
from moejax.checkpoints.orbax_directory import save_orbax as save_orbax
from moejax.checkpoints.reader import stored_dtype as stored_dtype
from moejax.checkpoints.resolve import resolve_checkpoint as resolve_checkpoint
from moejax.checkpoints.save import save_hf_checkpoint as save_hf_checkpoint
