"""What a step makes smaller: tasks, losses over the global batch, and which losses it takes."""
