"""Subjects keep models and instances apart, whatever characters their names have."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects
from tests.support.memory_bus import matches

FUNCTIONS = [
    function
    for name, function in inspect.getmembers(subjects, inspect.isfunction)
    if not name.startswith("_") and function.__module__ == subjects.__name__
]
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=20)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@given(data=st.data())
def test_any_name_makes_one_part_of_a_valid_subject(function: object, data: st.DataObject) -> None:
    assert callable(function)
    names = [data.draw(NAMES.filter(lambda name: name != "*")) for _ in inspect.signature(function).parameters]
    plain = ["x" for _ in names]
    subject = function(*names)
    assert len(subject.split(".")) == len(function(*plain).split("."))
    assert all(part and part not in ("*", ">") for part in subject.split("."))
    assert not any(character.isspace() for character in subject)


def test_without_a_name_it_is_the_subscription_to_all() -> None:
    assert matches(subjects.heartbeat("m"), subjects.heartbeat("m", "router", "r1"))
    assert matches(subjects.replica_load("m"), subjects.replica_load("m", "r0"))
    assert not matches(subjects.replica_kv("m"), subjects.replica_kv_snapshot("m", "r0"))
    assert not matches(subjects.heartbeat("m"), subjects.heartbeat("other", "router", "r1"))


def test_each_subject_says_who_speaks_to_whom() -> None:
    for function in FUNCTIONS:
        assert function.__doc__
        assert "->" in function.__doc__, function.__name__
