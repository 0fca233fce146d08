"""The configuration of a run: keys, sections, files and command line. Imports no jax."""
