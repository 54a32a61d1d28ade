"""From a Hugging Face checkpoint to a quantized one: what is done to what, and in which order."""
