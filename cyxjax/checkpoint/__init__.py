"""What is on disk of a run: verified checkpoints, their manifests, a run folder's lock. Knows no trainer."""
