"""Streams: data that are read from front to back, without an index."""
