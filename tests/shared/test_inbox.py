import asyncio

from shared.inbox import Inbox


async def test_all_items_that_are_there_are_taken_at_once_in_order() -> None:
    inbox: Inbox[int] = Inbox(10)
    for number in range(3):
        assert inbox.append(number)
    assert await inbox.take_ready() == [0, 1, 2]
    assert len(inbox) == 0


async def test_taking_waits_for_the_first_item() -> None:
    inbox: Inbox[str] = Inbox(10)
    taking = asyncio.create_task(inbox.take_ready())
    await asyncio.sleep(0)
    assert not taking.done()
    inbox.append("first")
    assert await taking == ["first"]


async def test_a_full_inbox_refuses_and_keeps_what_it_has() -> None:
    inbox: Inbox[int] = Inbox(2)
    assert [inbox.append(number) for number in range(3)] == [True, True, False]
    assert await inbox.take_ready() == [0, 1]
    assert inbox.append(3)


async def test_a_wake_up_without_items_returns_none_of_them() -> None:
    inbox: Inbox[int] = Inbox(2)
    inbox.wake()
    assert await inbox.take_ready() == []


async def test_a_cancelled_wait_loses_nothing() -> None:
    inbox: Inbox[int] = Inbox(2)
    taking = asyncio.create_task(inbox.take_ready())
    await asyncio.sleep(0)
    inbox.append(1)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert await inbox.take_ready() == [1]
