"""64 well mixed bits of a number: for the keys of an order, and for what a ledger adds up.

Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", OOPSLA: splitmix64's
increment and the two multipliers of its finalizer.
"""

import numpy as np
import numpy.typing as npt

GOLDEN, MUL_1, MUL_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(values: npt.ArrayLike) -> np.ndarray:
    """uint64 of the shape of `values`, integers: a bijection whose every bit depends on every bit of them."""
    x = np.asarray(values).astype(np.uint64) + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MUL_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MUL_2)
    return x ^ (x >> np.uint64(31))


def mix64(value: int) -> int:
    """`mix` of one number, of which 64 bits count."""
    return int(mix(np.array([value & (2**64 - 1)], np.uint64))[0])
