"""Fixtures for the trainer tests: every trainer creates a process group if there is none."""

from tests.support.trainers import as_users_promote as as_users_promote
from tests.support.trainers import one_device as one_device
from tests.support.trainers import own_group as own_group
from tests.support.trainers import two_devices as two_devices
