"""The worker's settings."""

from typing import Annotated, Literal

from msgspec import Meta

from shared.config import ServiceConfig


class WorkerConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    group: Annotated[str, Meta(description="Worker group that a scheduler claims; the instance's name when empty.")] = (
        ""
    )
    model_kind: Annotated[
        Literal["real", "simulated"], Meta(description="simulated: no weights, a step takes --simulated-step-ms.")
    ] = "real"
    simulated_step_ms: Annotated[float, Meta(description="Duration of a simulated step.", ge=0)] = 5.0
    device: Annotated[Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda where there is one.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(
            description="Of weights and KV; auto: float32 for float32 checkpoints, else bfloat16 where the hardware has it."
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "reference", "flashinfer"], Meta(description="auto: cpu, or flashinfer with cuda.")
    ] = "auto"
    context_len: Annotated[int, Meta(description="Longest sequence in tokens; 0: what the model takes.", ge=0)] = 0
    num_slots: Annotated[int, Meta(description="Tokens that the KV pool holds; 0: as memory allows.", ge=0)] = 0
    kv_memory_bytes: Annotated[int, Meta(description="Memory of the KV pool; 0: see --kv-memory-fraction.", ge=0)] = 0
    kv_memory_fraction: Annotated[
        float, Meta(description="Share of the memory left after loading that the KV pool takes.", gt=0, lt=1)
    ] = 0.3
    jump_forward: Annotated[
        bool, Meta(description="Take tokens that a grammar forces without sampling them, several in one step.")
    ] = True
    max_grammars: Annotated[int, Meta(description="Compiled grammars that are kept.", ge=1)] = 256
    num_threads: Annotated[int, Meta(description="Threads of the forward pass; 0: one per core.", ge=0)] = 0
    lease_ttl_s: Annotated[
        float, Meta(description="A lease lapses after this long without steps or heartbeats of its scheduler.", gt=0)
    ] = 3.0
