"""What tests of the trainer share: every trainer makes a process group where there is none."""

from tests.support.trainers import own_group, two_devices

__all__ = ["own_group", "two_devices"]
