"""What tests on eight devices share: the trainers among them make process groups."""

from tests.support.trainers import as_users_promote, own_group

__all__ = ["as_users_promote", "own_group"]
