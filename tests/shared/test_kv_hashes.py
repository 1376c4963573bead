from hypothesis import given
from hypothesis import strategies as st

from shared.kv_hashes import HASH_BYTES, block_hashes, chain_hashes, namespace_hash
from shared.messages.packing import pack_int32

token_lists = st.lists(st.integers(0, 3), max_size=20)
block_sizes = st.integers(1, 5)


@given(token_lists, token_lists, block_sizes)
def test_names_agree_exactly_as_far_as_whole_blocks_agree(a: list[int], b: list[int], block_size: int) -> None:
    names_a, names_b = (block_hashes("", pack_int32(tokens), block_size) for tokens in (a, b))
    assert len(names_a) == len(a) // block_size
    for index, (name_a, name_b) in enumerate(zip(names_a, names_b, strict=False)):
        end = (index + 1) * block_size
        assert (name_a == name_b) == (a[:end] == b[:end])


@given(token_lists, block_sizes, st.integers(0, 20))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], block_size: int, cut: int) -> None:
    names = block_hashes("tenant", pack_int32(tokens), block_size)
    done = min(cut, len(names))
    previous = names[done - 1] if done else namespace_hash("tenant")
    assert names[done:] == chain_hashes(previous, pack_int32(tokens[done * block_size :]), block_size)


def test_namespaces_share_no_name() -> None:
    tokens = pack_int32(range(64))
    assert set(block_hashes("a", tokens)).isdisjoint(block_hashes("b", tokens))


def test_a_namespace_cannot_be_chosen_to_continue_another_ones_chain() -> None:
    """Its text may be the very bytes that are hashed for a block, and yet it starts elsewhere."""
    tokens = pack_int32(range(0x41, 0x45))
    for salt in range(10_000):
        start = namespace_hash(f"tenant-{salt}").to_bytes(HASH_BYTES, "little")
        if all(byte < 0x80 for byte in start):
            break
    else:
        raise AssertionError("no namespace whose hash is text")
    (victim,) = block_hashes(f"tenant-{salt}", tokens, block_size=4)
    assert namespace_hash((start + tokens).decode()) != victim


def test_names_are_the_same_in_every_process() -> None:
    """Routers and schedulers of different hosts and versions compare them: a change of the scheme breaks a running system."""
    assert f"{namespace_hash('acme'):016x}" == "0fb86c38d9fec162"
    hashes = block_hashes("acme", pack_int32(range(7)), block_size=3)
    assert [f"{name:016x}" for name in hashes] == ["6ef84d2534a308d4", "0f52f5e307c6223e"]
