"""Errors of a rank: written to a file, printed, and sent to the other ranks."""
