"""What is on disk of a run: verified checkpoints, their manifests, the lock of a run folder. Knows no trainer."""
