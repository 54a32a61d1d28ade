"""config.json and tensor names of Hugging Face checkpoints, family by family."""
