"""What the guides' tests share: their programs make process groups, as the guides tell people to."""

from tests.support.trainers import own_group

__all__ = ["own_group"]
