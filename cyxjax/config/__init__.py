"""What a run is: its keys, their sections, files and command line. Loads no jax."""
