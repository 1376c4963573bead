"""Names for cached prefixes that routers and schedulers agree on without sending tokens.

A prompt is cut into blocks of `block_size` tokens, and each block is named by a hash of its tokens and of the name before it.
So a name stands for the whole prefix up to the end of its block, and a router finds the longest cached prefix of a prompt by
looking up one name after the other. The chain starts from the namespace: tenants never share a name. Names are hints for
routing; what a request may read is decided by the radix tree, which compares the tokens themselves.
"""

from hashlib import blake2b

from shared.messages.packing import INT32_BYTES

DEFAULT_BLOCK_SIZE = 32
"""Tokens in a block. Routers and schedulers must use the same number."""

HASH_BYTES = 8

# Namespaces and blocks are hashed under different personalisations: otherwise a namespace made of a name and tokens
# could be chosen so that its chain starts in the middle of another tenant's.
_NAMESPACE = b"rm.namespace"
_BLOCK = b"rm.block"


def namespace_hash(namespace: str) -> int:
    """Where the chain of a namespace starts, as uint64."""
    return int.from_bytes(blake2b(namespace.encode(), digest_size=HASH_BYTES, person=_NAMESPACE).digest(), "little")


def chain_hashes(previous: int, tokens: bytes, block_size: int = DEFAULT_BLOCK_SIZE) -> list[int]:
    """Names of the whole blocks in `tokens` (packed int32), which follow the block or namespace named `previous`.

    Tokens behind the last whole block have no name yet and are left out.
    """
    block_bytes = block_size * INT32_BYTES
    digest = previous.to_bytes(HASH_BYTES, "little")
    hashes = []
    for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
        block = digest + tokens[start : start + block_bytes]
        digest = blake2b(block, digest_size=HASH_BYTES, person=_BLOCK).digest()
        hashes.append(int.from_bytes(digest, "little"))
    return hashes


def block_hashes(namespace: str, tokens: bytes, block_size: int = DEFAULT_BLOCK_SIZE) -> list[int]:
    """Names of the whole blocks of a prompt (packed int32), in order: one uint64 for every `block_size` tokens."""
    return chain_hashes(namespace_hash(namespace), tokens, block_size)
