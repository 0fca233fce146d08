"""Reads run folders: the model, its outputs in other formats, the audit of its samples."""
