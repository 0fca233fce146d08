"""What tests on eight devices share: the trainers among them make process groups."""

from tests.support.trainers import own_group

__all__ = ["own_group"]
