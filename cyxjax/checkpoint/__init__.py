"""Checkpoints of a run on disk, their manifests, and the lock of a run folder; independent of the trainer."""
