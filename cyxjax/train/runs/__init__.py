"""A run folder read again: its model, its outputs in other formats, the proof of its samples."""
