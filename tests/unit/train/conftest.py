"""Fixtures for the trainer tests: every trainer creates a process group if there is none."""

from tests.support.trainers import as_users_promote, one_device, own_group, two_devices

__all__ = ["as_users_promote", "one_device", "own_group", "two_devices"]
