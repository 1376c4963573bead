import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sampling.counter_random import GAMMA, splitmix64, uniforms

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31)


def test_the_hash_is_splitmix64_as_published():
    state = np.arange(1, 6, dtype=np.uint64) * GAMMA + np.uint64(1234567)
    assert splitmix64(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=20))
def test_a_number_depends_on_its_own_seed_and_position_alone(pairs):
    together = uniforms(*zip(*pairs, strict=True))
    assert together.tolist() == [uniforms([seed], [position])[0] for seed, position in pairs]
    assert ((together >= 0) & (together < 1)).all()


def test_numbers_are_uniform_and_neither_positions_nor_seeds_correlate():
    size = 100_000
    along = uniforms([7] * size, range(size))
    across = uniforms(range(size), [7] * size)
    for numbers in (along, across):
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        chi_square = ((counts - size / 100) ** 2 / (size / 100)).sum()
        assert chi_square < 180  # 99 degrees of freedom: exceeded once in a million
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    neighbour = uniforms([8] * size, range(size))
    assert abs(np.corrcoef(along, neighbour)[0, 1]) < 0.02
