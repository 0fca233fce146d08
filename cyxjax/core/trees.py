"""Names of a tree's leaves: paths such as `params/Dense_0/kernel`. Checkpoints hold leaves by them."""

from typing import Any

import jax

PyTree = Any


def path_name(path: Any, separator: str = "/") -> str:
    """The name of the leaf at a path of `jax.tree_util`; "" for a tree that is one leaf."""
    return jax.tree_util.keystr(path, simple=True, separator=separator)


def named_leaves(tree: PyTree, separator: str = "/") -> list[tuple[str, Any]]:
    """(name, leaf) of every leaf, in the tree's order."""
    return [(path_name(path, separator), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_names(tree: PyTree) -> list[str]:
    """Names of the leaves, in the tree's order."""
    return [name for name, _ in named_leaves(tree)]
