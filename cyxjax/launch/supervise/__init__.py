"""Starts, watches, stops and restarts the ranks of one host."""
