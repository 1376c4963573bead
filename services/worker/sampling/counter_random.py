"""Random numbers that are a function of (seed, position): the same token in any batch, and again after a restart.

The generator is SplitMix64 ("Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) used as a counter: its n-th output
is a hash of `state + n * GAMMA`, so any position can be computed without those before it. The seed is hashed first, because
neighbouring seeds would otherwise start neighbouring states.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""The odd integer nearest to 2**64 divided by the golden ratio."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64: a bijection in which each input bit flips each output bit half of the time."""
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of an int64 seed and a position, in steps of 2**-53. float64 [n]"""
    states = splitmix64(np.array(seeds, np.int64).astype(np.uint64))
    states += GAMMA * (np.array(positions, np.uint64) + np.uint64(1))
    return (splitmix64(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53
