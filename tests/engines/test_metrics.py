"""What is read of an engine's /metrics: the names of vLLM 0.6 and of today, of llama.cpp, and damaged text.

The samples have the names that the releases print, with values of our own.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.observation import EngineReading
from loadmaster.engines.metrics import engine_reading, progress, read_figures

# vLLM 0.6.6: V0, one engine, no label of it
OLD = """\
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 4.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.97
vllm:cpu_cache_usage_perc{model_name="m"} 0.0
vllm:num_preemptions_total{model_name="m"} 7.0
vllm:prompt_tokens_total{model_name="m"} 1000.0
vllm:generation_tokens_total{model_name="m"} 500.0
vllm:iteration_tokens_total_sum{model_name="m"} 1500.0
vllm:iteration_tokens_total_bucket{le="1.0",model_name="m"} 3.0
vllm:iteration_tokens_total_count{model_name="m"} 30.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 2.0
vllm:time_to_first_token_seconds_count{model_name="m"} 10.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 5.0
vllm:time_per_output_token_seconds_count{model_name="m"} 500.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 8.0
vllm:request_success_total{finished_reason="length",model_name="m"} 2.0
"""
# vLLM 0.33: two replicas
NEW = """\
vllm:num_requests_running{engine="0",model_name="a \\"b\\" {c}"} 2.0
vllm:num_requests_running{engine="1",model_name="a \\"b\\" {c}"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 2e3
vllm:generation_tokens_total{engine="0",model_name="m"} 900.0
vllm:mm_cache_queries_total{engine="0",model_name="m"} 12.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 60.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 40.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 9.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 900.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 99.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 10.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 8.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="m"} 1.0
"""
LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
llamacpp:prompt_tokens_total 100
llamacpp:tokens_predicted_total 50
llamacpp:tokens_predicted_seconds_total 2.5
llamacpp:n_decode_total 60
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""


def reading(text: str, before: str | None = None) -> EngineReading:
    figures = read_figures(text)
    assert figures is not None
    return engine_reading(figures, None if before is None else read_figures(before), EngineReading(state="ready"))


def test_the_names_of_0_6() -> None:
    found = reading(OLD)
    assert (found.running, found.waiting, found.steps) == (2, 5, 30.0)
    assert (found.kv_cache_usage, found.preemptions) == (0.97, 7)
    assert (found.prompt_tokens, found.generation_tokens, found.requests, found.errors) == (1000, 500, 10, 0)
    assert found.pictures is None
    assert found.time_to_first_token_s is None  # a mean needs two looks


def test_the_names_of_0_33_over_replicas() -> None:
    found = reading(NEW)
    assert (found.running, found.waiting, found.steps) == (5, 1, 100.0)
    assert found.kv_cache_usage == 0.5
    assert (found.pictures, found.prompt_tokens, found.errors, found.requests) == (12, 2000, 1, 11)


def test_means_are_of_what_ended_in_between() -> None:
    later = (
        OLD.replace('first_token_seconds_sum{model_name="m"} 2.0', 'first_token_seconds_sum{model_name="m"} 5.0')
        .replace('first_token_seconds_count{model_name="m"} 10.0', 'first_token_seconds_count{model_name="m"} 14.0')
        .replace('output_token_seconds_sum{model_name="m"} 5.0', 'output_token_seconds_sum{model_name="m"} 6.0')
        .replace('output_token_seconds_count{model_name="m"} 500.0', 'output_token_seconds_count{model_name="m"} 600.0')
    )
    found = reading(later, OLD)
    assert found.time_to_first_token_s == pytest.approx(0.75)
    assert found.inter_token_latency_s == pytest.approx(0.01)
    assert reading(OLD, OLD).time_to_first_token_s is None
    assert reading(OLD, later).time_to_first_token_s is None  # another engine has begun to count


def test_llama_cpp() -> None:
    later = LLAMA.replace("predicted_total 50", "predicted_total 60").replace("total 2.5", "total 3.0")
    found = reading(later, LLAMA)
    assert (found.running, found.waiting, found.steps) == (1, 2, 220.0)
    assert found.inter_token_latency_s == pytest.approx(0.05)
    assert found.kv_cache_usage is None


@pytest.mark.parametrize("text", ["", "# HELP x\n", "python_gc_objects_collected_total 4.0\n", "\x00\xff", "{}\n} 1\n"])
def test_text_that_tells_nothing(text: str) -> None:
    assert read_figures(text) is None
    assert progress(text) is None


@given(st.sampled_from((OLD, NEW, LLAMA)), st.data())
def test_damaged_text_breaks_nothing(text: str, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(text)))
    rest = data.draw(st.text(max_size=20))
    damaged = text[:place] + rest + text[data.draw(st.integers(place, len(text))) :]
    figures = read_figures(damaged)
    if figures is not None:
        assert figures.running >= 0
        engine_reading(figures, read_figures(text), EngineReading())


def test_progress_is_the_same_reading() -> None:
    found = progress(NEW)
    assert found is not None
    assert (found.running, found.waiting, found.steps, found.busy) == (5, 1, 100.0, True)


def test_only_llama_cpp_counts_tokens_at_a_requests_end() -> None:
    assert reading(LLAMA).late_totals == ("prompt_tokens", "generation_tokens")
    assert reading(OLD).late_totals == ()
    assert reading(NEW).late_totals == ()
