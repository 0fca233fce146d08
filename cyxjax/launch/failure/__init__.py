"""Errors of a rank: on file, on the screen, told to the peers."""
