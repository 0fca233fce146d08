"""Weights that others trained: read from their files, their names met with a model's. None of it runs."""
