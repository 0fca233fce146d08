"""What the guides' tests share: their programs make process groups, as the guides tell people to."""

from tests.support.trainers import one_device, own_group, two_devices

__all__ = ["one_device", "own_group", "two_devices"]
