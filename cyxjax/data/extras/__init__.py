"""Formats that need a library of their own, an extra: it is imported when it is asked for."""
