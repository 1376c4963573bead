"""Every schema of the official suite is enforced exactly or refused."""

from collections import Counter

import pytest

from tests.support.json_schema_suite import FORMAT, ORDER, SUITE, WHOLE_FLOAT, run_suite

pytestmark = pytest.mark.skipif(not SUITE.exists(), reason="the JSON Schema Test Suite is not beside the repository")


@pytest.fixture(scope="module")
def outcomes(vetter):
    return run_suite(vetter)


def test_no_invalid_instance_is_accepted(outcomes):
    assert [d for outcome in outcomes for d in outcome.differences if not d.is_valid] == []


def test_every_valid_instance_is_accepted_but_for_known_reasons(outcomes):
    reasons = Counter(d.reason for outcome in outcomes for d in outcome.differences)
    assert reasons == {ORDER: 3, WHOLE_FLOAT: 9, FORMAT: 10}


def test_every_refusal_names_what_it_is_about(outcomes):
    for outcome in outcomes:
        for case, message in outcome.refusals:
            assert "`" in message or "#/" in message or "enforced: " in message, (outcome.keyword, case, message)


def test_most_schemas_are_enforced(outcomes):
    assert sum(outcome.num_enforced for outcome in outcomes) >= 220
