"""The backend: which devices jax starts on, compiled programs on disk, private names of jax."""
