"""Training of the demo model: data, losses, optimiser, evaluation. Serving never imports this."""
