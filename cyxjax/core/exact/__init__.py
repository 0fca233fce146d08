"""`reproducibility: exact`: a step whose bits do not depend on how many devices share it."""
