import pytest

from services.worker.memory import MIN_SLOTS, available_memory_bytes, check_weights_fit, pool_slots
from shared.config import StartupError

MIB = 1 << 20


def slots(**settings):
    defaults = {
        "num_slots": 0,
        "kv_memory_bytes": 0,
        "kv_memory_fraction": 0.5,
        "slot_bytes": 1024,
        "available_bytes": 100 * MIB,
    }
    return pool_slots(**(defaults | settings))


def test_a_number_of_slots_wins_over_bytes_and_bytes_over_a_fraction():
    assert slots() == 50 * 1024
    assert slots(kv_memory_bytes=10 * MIB) == 10 * 1024
    assert slots(kv_memory_bytes=10 * MIB, num_slots=40) == 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 200 * 1024}, "num_slots 204800 needs 200 MiB for the KV pool, 100 MiB are available"),
        ({"kv_memory_bytes": 300 * MIB}, "kv_memory_bytes is 300 MiB, 100 MiB are available"),
        ({"slot_bytes": MIB}, f"would hold 50 tokens in 50 MiB .* at least {MIN_SLOTS} are needed"),
    ],
)
def test_too_little_memory_is_refused_with_both_numbers(settings, message):
    with pytest.raises(StartupError, match=message):
        slots(**settings)


def test_weights_that_do_not_fit_are_refused():
    check_weights_fit(10 * MIB, 10 * MIB)
    with pytest.raises(StartupError, match="the model takes 11 MiB, 10 MiB are available"):
        check_weights_fit(11 * MIB, 10 * MIB)


def test_a_containers_limit_counts_where_it_is_lower(tmp_path):
    machine = available_memory_bytes(tmp_path)
    assert machine > 0
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 1 * MIB
    (tmp_path / "memory.max").write_text("5000\n")
    assert available_memory_bytes(tmp_path) == 4000
    (tmp_path / "memory.max").write_text("500\n")
    assert available_memory_bytes(tmp_path) == 0
