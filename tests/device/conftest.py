"""Fixtures for tests on eight devices: some use trainers, which create process groups."""

from tests.support.trainers import as_users_promote, one_device, own_group, two_devices

__all__ = ["as_users_promote", "one_device", "own_group", "two_devices"]
