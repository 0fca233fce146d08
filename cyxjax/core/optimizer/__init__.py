"""What is asked of an optimizer before it moves anything, and the parts that are put around it."""
