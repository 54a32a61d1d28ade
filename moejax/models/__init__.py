"""The models: their shapes, their weights' names, and their maths as Flax NNX modules."""
