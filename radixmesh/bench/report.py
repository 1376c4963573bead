"""What a run showed, for people: a table, and the distribution of latencies as bars in the terminal."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from radixmesh.bench.measure import Sample, Summary

_BARS = " ▁▂▃▄▅▆▇█"
_NUM_BINS = 40


def table_of(summaries: Sequence[Summary]) -> Table:
    """Fits 80 columns: output in tokens, times to the first token and between tokens in milliseconds."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("workload", no_wrap=True)
    for heading in ("calls", "wall s", "calls/s", "output/s", "TTFT p50", "p99", "ITL p50", "p99", "cached"):
        table.add_column(heading, justify="right", no_wrap=True)
    for s in summaries:
        table.add_row(
            s.workload,
            str(s.num_requests),
            f"{s.wall_s:.1f}",
            f"{s.requests_per_s:.2f}",
            f"{s.output_tokens_per_s:.1f}",
            *(f"{1e3 * seconds:.0f}" for seconds in (s.ttft_p50_s, s.ttft_p99_s, s.itl_p50_s, s.itl_p99_s)),
            f"{s.cached_share:.0%}",
        )
    return table


def latency_plot(samples: dict[str, list[Sample]]) -> Text:
    """Histograms over a common logarithmic axis of milliseconds: one line for each workload and kind of latency."""
    series = {
        f"{name} {kind}": values
        for name, taken in samples.items()
        for kind, values in (("TTFT", [s.ttft_s for s in taken]), ("ITL", [gap for s in taken for gap in s.itl_s]))
        if values
    }
    if not series:
        return Text()
    low = math.log10(max(1e-5, min(min(values) for values in series.values())))
    high = max(low + 0.1, math.log10(max(max(values) for values in series.values())))
    width = max(map(len, series))
    plot = Text()
    for label, values in series.items():
        counts = [0] * _NUM_BINS
        for value in values:
            place = (math.log10(max(value, 1e-5)) - low) / (high - low)
            counts[min(_NUM_BINS - 1, int(place * _NUM_BINS))] += 1
        top = max(counts)
        bars = "".join(_BARS[math.ceil(count / top * (len(_BARS) - 1))] for count in counts)
        plot.append(f"{label:<{width}} ").append(bars, style="cyan" if label.endswith("TTFT") else "green").append("\n")
    left, right = f"{10 ** (low + 3):.2g} ms", f"{10 ** (high + 3):.0f} ms"
    return plot.append(f"{'':<{width}} {left}{right:>{_NUM_BINS - len(left)}}", style="dim")
