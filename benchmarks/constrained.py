"""What constrained decoding costs and saves in the worker: `python -m benchmarks.constrained`.

Requests ask for a small JSON profile. Printed are the time to compile a grammar, to follow a token and to fill a mask; requests
per second with and without jump-forward beside free text of the same lengths; and the mean step with 64 grammars in one batch.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Literal

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from benchmarks.machine import default_model, describe_machine
from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.opening import open_engine
from shared.messages.execution import NewSequence
from shared.messages.sampling import SamplingParams
from tests.support.lagging_scheduler import Generated, LaggingScheduler
from tests.support.worker_steps import new_sequence

MAX_NEW_TOKENS = 120
NUM_GRAMMARS = 64


def profile_schema(number: int) -> dict[str, Any]:
    """Schemas that differ in their keys, so that no two share a grammar."""
    return {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "maxLength": 30},
            "role": {"enum": ["administrator", "editor", "user"]},
            "active": {"type": "boolean"},
        },
        "required": [f"name_{number}", "age", "email", "role", "active"],
        "additionalProperties": False,
    }


def grammar_of(schema: dict[str, Any]) -> str:
    grammar: str = LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    )
    return grammar


class Bench:
    def __init__(self, folder: str, dtype: Literal["auto", "bfloat16", "float32"], width: int, rounds: int) -> None:
        self.config = WorkerConfig(model_path=folder, dtype=dtype, num_slots=512 * max(width, NUM_GRAMMARS))
        self.width = width
        self.rounds = rounds
        self.tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")

    def requests(self, grammars: list[str | None], lengths: Mapping[int, int] | None = None) -> dict[int, NewSequence]:
        """One per grammar; with `lengths`, free text of exactly so many tokens."""
        return {
            handle: new_sequence(
                handle,
                self.tokenizer.encode(f"Here is the profile of person number {handle} as JSON:\n").ids,
                max_new_tokens=lengths[handle] if lengths else MAX_NEW_TOKENS,
                sampling=SamplingParams(seed=handle, ignore_eos=lengths is not None),
                grammar=grammar,
            )
            for handle, grammar in enumerate(grammars, 1)
        }

    def timed(self, engine: Engine, requests: dict[int, NewSequence]) -> tuple[float, int, dict[int, Generated]]:
        """(seconds, steps, what came out) of running all of them together; the fastest of a few rounds."""
        best_s, num_steps, outputs = float("inf"), 0, {}
        for _ in range(self.rounds):
            engine.reset()
            scheduler = LaggingScheduler(engine, reserve=64)
            started = time.perf_counter()
            outputs = scheduler.run(requests)
            best_s = min(best_s, time.perf_counter() - started)
            num_steps = scheduler.num_steps
        return best_s, num_steps, outputs

    def warm_up(self, engine: Engine) -> None:
        self.timed(engine, self.requests([None] * 2, {1: 4, 2: 4}))

    def compare(self) -> None:
        grammars: list[str | None] = [grammar_of(profile_schema(0))] * self.width
        for jump_forward in (False, True):
            with closing(open_engine(msgspec.structs.replace(self.config, jump_forward=jump_forward))) as engine:
                self.warm_up(engine)
                seconds, steps, outputs = self.timed(engine, self.requests(grammars))
                lengths = {handle: len(output.token_ids) for handle, output in outputs.items()}
                free_s, free_steps, _ = self.timed(engine, self.requests([None] * self.width, lengths))
            tokens = sum(lengths.values())
            print(
                f"{'jump-forward' if jump_forward else 'every token sampled':20} {tokens:5} tokens:"
                f" {self.width / seconds:6.2f} requests/s in {steps:3} steps;"
                f" free text {self.width / free_s:6.2f} in {free_steps:3}; ratio {free_s / seconds:.2f}"
            )

    def many_grammars(self) -> None:
        """The mean step, where each row has a grammar of its own and where none has one."""
        with closing(open_engine(msgspec.structs.replace(self.config, jump_forward=False))) as engine:
            self.warm_up(engine)
            grammars: list[str | None] = [grammar_of(profile_schema(number)) for number in range(NUM_GRAMMARS)]
            seconds, steps, outputs = self.timed(engine, self.requests(grammars))
            lengths = {handle: len(output.token_ids) for handle, output in outputs.items()}
            free_s, free_steps, _ = self.timed(engine, self.requests([None] * NUM_GRAMMARS, lengths))
        step_ms, free_ms = seconds / steps * 1e3, free_s / free_steps * 1e3
        print(f"{NUM_GRAMMARS} grammars at once: {step_ms:.1f} ms a step, free text {free_ms:.1f} ms")


def matcher_costs(folder: str, vocab_size: int) -> None:
    tokenizer = LLTokenizer(f"{folder}/tokenizer.json", n_vocab=vocab_size)
    text = '{"name_0": "Ada Lovelace", "age": 36, "email": "ada@example.com", "role": "editor", "active": true}'
    compile_s, follow_s, mask_s = [], [], []
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    for _ in range(20):
        started = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar_of(profile_schema(0)), log_level=0)
        compile_s.append(time.perf_counter() - started)
        for token in tokenizer.tokenize_str(text):
            started = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            masked = time.perf_counter()
            matcher.consume_token(token)
            matcher.compute_ff_tokens()
            mask_s.append(masked - started)
            follow_s.append(time.perf_counter() - masked)
    print(
        f"grammar compiled in {statistics.median(compile_s) * 1e3:.2f} ms; a token: mask {statistics.mean(mask_s) * 1e6:.0f} us,"
        f" follow and look ahead {statistics.mean(follow_s) * 1e6:.0f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; the default model when left out")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--width", type=int, default=8, help="requests that run at the same time")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.model = args.model or default_model()
    print(describe_machine())
    bench = Bench(args.model, args.dtype, args.width, args.rounds)
    matcher_costs(args.model, bench.tokenizer.get_vocab_size())
    bench.compare()
    bench.many_grammars()


if __name__ == "__main__":
    main()
