"""Pipeline from a Hugging Face checkpoint to a quantized one."""
