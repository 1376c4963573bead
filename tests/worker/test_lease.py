from services.worker.lease import LeaseKeeper, Verdict
from shared.messages.execution import Claim, Refused
from tests.support.worker_steps import step

ANNA = Claim(replica_id="r1", scheduler_instance="anna")
BERTA = Claim(replica_id="r2", scheduler_instance="berta")


def leased(now_ms=0, unix_ms=1000):
    keeper = LeaseKeeper(ttl_ms=3000)
    assert keeper.claim(ANNA, now_ms, unix_ms) is None
    return keeper


def test_a_lease_excludes_other_schedulers_until_it_lapses():
    keeper = leased(now_ms=0)
    assert keeper.claim(BERTA, 3000, 2000) == Refused(reason="leased to 'anna'")
    assert not keeper.has_lapsed(3000)
    assert keeper.has_lapsed(3001)
    assert keeper.claim(BERTA, 3001, 2000) is None
    assert keeper.holder == BERTA


def test_signs_of_life_prolong_a_lease():
    keeper = leased(now_ms=0)
    keeper.keep_alive(2900)
    assert keeper.claim(BERTA, 5900, 2000) is not None


def test_the_holder_may_claim_again_and_gets_a_new_epoch():
    keeper = leased()
    first = keeper.epoch
    assert keeper.take(step(1, epoch=first))[0] is Verdict.RUN
    assert keeper.claim(ANNA, 10, 1000) is None
    assert keeper.epoch > first
    assert keeper.take(step(1, epoch=first))[0] is Verdict.FOREIGN
    assert keeper.take(step(1, epoch=keeper.epoch))[0] is Verdict.RUN


def test_epochs_grow_across_restarts_and_when_the_wall_clock_stands_still():
    assert leased(unix_ms=5000).epoch > leased(unix_ms=4000).epoch
    keeper = leased(unix_ms=5000)
    keeper.end()
    keeper.claim(ANNA, 0, 4000)
    assert keeper.epoch == 5001


def test_steps_are_taken_once_in_order_and_a_gap_is_none():
    keeper = leased(unix_ms=7)
    assert keeper.take(step(1, epoch=7)) == (Verdict.RUN, "")
    assert keeper.take(step(1, epoch=7)) == (Verdict.REPEATED, "")
    assert keeper.take(step(2, epoch=7)) == (Verdict.RUN, "")
    assert keeper.take(step(4, epoch=7)) == (Verdict.LAPSED, "step 3 is missing")
    assert keeper.take(step(3, epoch=6)) == (Verdict.FOREIGN, "the lease has epoch 7")
    keeper.end()
    assert keeper.take(step(3, epoch=7)) == (Verdict.FOREIGN, "there is no lease")


def test_the_last_two_results_are_kept():
    keeper = leased(unix_ms=7)
    for seq in (1, 2, 3):
        assert keeper.keep(7, seq, b"%d" % seq)
    assert keeper.kept_from(1) == [b"2", b"3"]
    assert keeper.kept_from(3) == [b"3"]
    assert keeper.can_resend(2)
    assert keeper.can_resend(4)
    assert not keeper.can_resend(1)


def test_a_result_of_an_ended_epoch_is_not_kept():
    keeper = leased(unix_ms=7)
    keeper.claim(ANNA, 0, 8)
    assert not keeper.keep(7, 1, b"old")
    assert keeper.kept_from(1) == []
