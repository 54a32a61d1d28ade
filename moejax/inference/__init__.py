"""One batch through compiled steps: chunks of prompts, decoding, sampling, likelihood."""
