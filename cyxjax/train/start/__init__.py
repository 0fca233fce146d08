"""What is computed once at the start of a run, before its first write."""
