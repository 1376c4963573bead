"""Requests and tokens a minute, by key."""

from services.gateway.quotas import Quotas


def test_requests_are_refused_beyond_the_limit_until_the_bucket_fills():
    quotas = Quotas(max_requests_per_minute=2, max_tokens_per_minute=0)
    assert [quotas.admit("k", 0.0), quotas.admit("k", 0.0)] == [None, None]
    refusal = quotas.admit("k", 0.0)
    assert refusal is not None
    assert (refusal.status, refusal.retry_after_s) == (429, 30.0)
    assert "2 requests per minute" in str(refusal)
    assert quotas.admit("k", 30.0) is None


def test_tokens_are_charged_when_known_and_paid_back_over_time():
    quotas = Quotas(max_requests_per_minute=0, max_tokens_per_minute=600)
    assert quotas.admit("k", 0.0) is None
    quotas.charge("k", 900, 0.0)
    refusal = quotas.admit("k", 0.0)
    assert refusal is not None
    assert refusal.status == 429
    assert 30 <= refusal.retry_after_s <= 31
    assert quotas.admit("k", 31.0) is None


def test_keys_have_buckets_of_their_own():
    quotas = Quotas(max_requests_per_minute=1, max_tokens_per_minute=0)
    assert quotas.admit("a", 0.0) is None
    assert quotas.admit("b", 0.0) is None
    assert quotas.admit("a", 0.0) is not None


def test_no_limit_admits_everything():
    quotas = Quotas(0, 0)
    assert all(quotas.admit("k", 0.0) is None for _ in range(1000))
