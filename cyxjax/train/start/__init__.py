"""What a start computes once, before its first write: compiled functions, and whether all fits together."""
