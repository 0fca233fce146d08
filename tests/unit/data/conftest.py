"""Fixtures for the data tests."""

from tests.support.trainers import two_devices

__all__ = ["two_devices"]
