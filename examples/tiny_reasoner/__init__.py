"""A reasoner small enough for a repository: a task, a character tokenizer, its training and the trained model."""
