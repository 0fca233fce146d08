"""What tests of the trainer share: every trainer makes a process group where there is none."""

from tests.support.trainers import as_users_promote, one_device, own_group, two_devices

__all__ = ["as_users_promote", "one_device", "own_group", "two_devices"]
