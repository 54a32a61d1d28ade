"""Text: tokenizer, chat template, prompts, and the texts that evaluations read."""
