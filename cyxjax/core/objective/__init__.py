"""What a step minimizes and measures: tasks, terms, losses over the global batch, metrics."""
