from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.sampling.penalties import TokenCounts

TOKENS = st.lists(st.integers(0, 300), max_size=400)


@given(prompt=TOKENS, resumed=TOKENS, generated=TOKENS)
def test_counts_are_of_generated_tokens_and_ids_of_both(prompt, resumed, generated):
    table = TokenCounts(np.array(prompt, np.int32), np.array(resumed, np.int32))
    for token in generated:
        table.add(token)
    expected = Counter(resumed + generated)
    assert len(set(table.ids.tolist())) == len(table.ids)
    assert dict(zip(table.ids.tolist(), table.counts.tolist(), strict=True)) == {
        token: expected[token] for token in {*prompt, *resumed, *generated}
    }
