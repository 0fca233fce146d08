"""What tests of data share."""

from tests.support.trainers import two_devices

__all__ = ["two_devices"]
