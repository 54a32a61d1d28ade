"""What a model is worth: perplexity, and the texts that it is measured on."""
