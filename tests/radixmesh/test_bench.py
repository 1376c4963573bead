"""The load generator: what it sends, and how it sums up what it saw."""

import io
import json

import pytest
from rich.console import Console

from radixmesh.bench.measure import Sample, percentile, summarise
from radixmesh.bench.report import latency_plot, table_of
from radixmesh.bench.workloads import WORKLOADS, Call, Texts, Workload, build, read_questions
from radixmesh.client import Usage
from radixmesh.errors import UsageError


def sample(ttft_s: float, *itl_s: float, cached: int = 0) -> Sample:
    return Sample(ttft_s, itl_s, ttft_s + sum(itl_s), Usage(10, 1 + len(itl_s), cached))


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_names_the_same_work_each_time_and_another_seed_other_work(name):
    assert build(name, Texts("a")).calls == build(name, Texts("a")).calls
    assert build(name, Texts("a")).calls != build(name, Texts("b")).calls


@pytest.mark.parametrize("name", ["few-shot", "tree"])
def test_texts_that_should_share_a_prefix_do_and_two_seeds_share_none(name):
    one, two = (build(name, Texts(seed)).calls for seed in ("a", "b"))
    assert one[0].prompt[:200] == one[-1].prompt[:200]
    assert one[0].prompt[:8] != two[0].prompt[:8]


def test_a_conversation_counts_each_of_its_turns():
    assert [call.num_requests for call in build("multi-turn", Texts("a")).calls] == [4] * 8


def test_questions_come_from_a_file_when_one_is_given(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"q{i}?"}) for i in range(300)))
    assert set(Texts("a", read_questions(file)).questions) == {f"q{i}?" for i in range(300)}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"question": "only one"}', "has 1 questions, at least 150"),
        ('{"text": 1}', "`question`"),
        ("no json", "`question`"),
    ],
)
def test_a_file_of_questions_that_cannot_be_used_is_refused(content, complaint, tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=complaint):
        read_questions(file)


def test_percentiles_are_values_that_were_measured():
    assert percentile([], 99) == 0
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(1, 101)], 99) == 99.0
    assert percentile([float(i) for i in range(1, 101)], 100) == 100.0


def test_rates_are_per_second_of_wall_time():
    workload = Workload("chat-8", 8, [Call("x", {})])
    summary = summarise(workload, [sample(0.1, 0.02, 0.04, cached=5), sample(0.3)], wall_s=2.0)
    assert (summary.num_requests, summary.requests_per_s, summary.output_tokens_per_s) == (2, 1.0, 2.0)
    assert (summary.ttft_p50_s, summary.ttft_p99_s, summary.itl_p99_s, summary.cached_share) == (0.1, 0.3, 0.04, 0.25)


def test_table_and_plot_show_every_workload():
    taken = [sample(0.1, 0.02, 0.04), sample(0.3)]
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(table_of([summarise(Workload("tree", 8, []), taken, 2.0)]))
    console.print(latency_plot({"tree": taken}))
    shown = console.export_text()
    assert "output/s" in shown
    assert "tree TTFT" in shown
    assert "tree ITL" in shown
    assert "█" in shown
    assert latency_plot({"nothing": []}).plain == ""
