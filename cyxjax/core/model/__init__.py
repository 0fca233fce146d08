"""Anybody's model as four plain functions, and what is put around them: statistics, recomputing, casts."""
