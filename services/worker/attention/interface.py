"""What a decoder asks of attention: once a step where everything lies, then once a layer the result."""

from typing import Protocol

from torch import Tensor

from services.worker.batch import ForwardBatch


class AttentionBackend(Protocol):
    """Causal grouped-query attention over a paged KV pool that it also fills.

    A row's result depends on that row alone: neighbours in the batch and the places of its slots change no bit of it.
    """

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the layers of this batch; `run` refers to it until the next plan."""
        ...

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new tokens' k and v in their slots, then attend.

        q       [T, heads, head_dim], rotated
        k, v    [T, kv_heads, head_dim], k rotated
        result  [T, heads * head_dim]

        The inputs may be strided views, of which only the last dimension is contiguous.
        """
        ...
