"""Logs as JSON lines with the ids of their context, and traces that cross the bus."""

import json
import subprocess
import sys
import textwrap

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from shared import telemetry


def run(code: str) -> tuple[int, list[str]]:
    """Run a program that sets up telemetry: it may do that once per process."""
    setup = """
        import logging
        from shared.config import ServiceConfig
        from shared import telemetry
        def setup(**settings):
            telemetry.setup(ServiceConfig(**settings), "scheduler", "s1")
    """
    program = textwrap.dedent(setup) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


def test_json_lines_carry_the_bound_ids_and_the_trace() -> None:
    code, lines = run("""
        setup(log_format="json")
        log = telemetry.get_logger("here")
        with telemetry.log_context(request_id="r1"), telemetry.tracer().start_as_current_span("phase"):
            log.info("admitted", num_tokens=3)
        log.info("outside")
        logging.getLogger("a.library").warning("its %s", "own words")
    """)
    assert code == 0
    inside, outside, library = map(json.loads, lines)
    assert inside["event"] == "admitted"
    assert (inside["request_id"], inside["num_tokens"], inside["level"]) == ("r1", 3, "info")
    assert len(inside["trace_id"]) == 32
    assert "request_id" not in outside
    assert "trace_id" not in outside
    assert (library["event"], library["logger"]) == ("its own words", "a.library")


def test_an_error_keeps_its_traceback_in_one_json_line() -> None:
    code, lines = run("""
        setup(log_format="json")
        try:
            raise ValueError("broken")
        except ValueError:
            telemetry.get_logger("here").exception("failed")
    """)
    assert code == 0
    assert len(lines) == 1
    assert "ValueError: broken" in json.loads(lines[0])["exception"]


def test_the_level_applies_to_our_lines_and_those_of_libraries() -> None:
    code, lines = run("""
        setup(log_format="json", log_level="warning")
        telemetry.get_logger("here").info("quiet")
        logging.getLogger("a.library").info("quiet")
        telemetry.get_logger("here").warning("loud")
    """)
    assert code == 0
    assert [json.loads(line)["event"] for line in lines] == ["loud"]


def test_pretty_lines_are_for_people() -> None:
    _, lines = run("""
        setup(log_format="pretty")
        telemetry.get_logger("here").info("ready", port=8000)
    """)
    assert "ready" in lines[0]
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[0])


def test_a_collector_that_is_away_does_not_hold_up_the_end() -> None:
    code, _ = run("""
        import time
        setup(log_level="error", otlp_endpoint="http://127.0.0.1:1")
        with telemetry.tracer().start_as_current_span("phase"):
            pass
        start = time.monotonic()
        telemetry.shutdown()
        assert time.monotonic() - start < 4, time.monotonic() - start
    """)
    assert code == 0


def test_a_trace_goes_on_behind_the_bus() -> None:
    tracer = TracerProvider().get_tracer("test")
    with tracer.start_as_current_span("gateway") as sender:
        message = telemetry.inject()
    assert set(message) == {"traceparent"}
    with tracer.start_as_current_span("scheduler", context=telemetry.extract(message)) as receiver:
        assert receiver.get_span_context().trace_id == sender.get_span_context().trace_id
        assert receiver.get_span_context().span_id != sender.get_span_context().span_id


def test_without_a_trace_there_is_nothing_to_carry() -> None:
    assert telemetry.inject() == {}
    assert not trace.get_current_span(telemetry.extract({})).get_span_context().is_valid
