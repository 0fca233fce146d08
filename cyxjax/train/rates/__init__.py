"""The learning rate over a run: what the configuration asks for, and the schedule it becomes."""
