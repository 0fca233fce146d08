"""Fixtures for the data tests."""

from tests.support.trainers import two_devices as two_devices
