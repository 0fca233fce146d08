"""Fixtures for the tests of the guides: their programs create process groups, as the guides say."""

from tests.support.trainers import one_device, own_group, two_devices

__all__ = ["one_device", "own_group", "two_devices"]
