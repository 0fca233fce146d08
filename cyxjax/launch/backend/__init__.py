"""What jax is started on: devices found and asked for, programs kept on disk, the private parts we use."""
