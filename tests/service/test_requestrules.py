"""Any JSON is judged or refused, never an error of ours; and what passed holds no URL that an engine would fetch."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.service.errors import ApiError, ImageError
from loadmaster.service.gatewaysettings import CHAT_ROUTE, COMPLETIONS_ROUTE
from loadmaster.service.passage import _data_urls_only
from loadmaster.service.requestbody import parse_object
from loadmaster.service.requestrules import judge

ROUTES = (CHAT_ROUTE, COMPLETIONS_ROUTE, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize")
URL = "http://169.254.169.254/latest"
WORDS = st.sampled_from(
    [
        "messages", "input", "prompt", "role", "user", "content", "type", "text", "image_url", "url", "input_image",
        "image", "source", "base64", "data", "media_type", "tool_result", "video_url", "audio_url", "input_audio", "n",
        "stream", "model", "system", "output", "uuid", "detail", "best_of", "file_url", URL, "data:image/png;base64,AA",
    ]
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5), max_leaves=25
)
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "image_url", "input_image", "image", "video_url", "audio_url", "tool_result", "input_audio"]
        )
    },
    optional={
        "text": st.just("x"),
        "image_url": st.sampled_from([URL, {"url": URL}, "data:,"]) | VALUES,
        "video_url": st.sampled_from([URL, {"url": URL}]),
        "audio_url": st.sampled_from([URL, {"url": URL}]),
        "source": st.sampled_from([{"type": "url", "url": URL}]) | VALUES,
        "content": st.lists(st.just({"type": "image", "source": {"type": "url", "url": URL}}), max_size=2) | VALUES,
        "input_audio": st.sampled_from([{"data": URL}, {"data": "AAAA", "format": "wav"}]),
        "uuid": st.just("1"),
    },
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PARTS, max_size=3) | VALUES}), max_size=3
)
ANY = st.dictionaries(WORDS, VALUES, max_size=5)
ONE_PART = st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(PARTS, min_size=1, max_size=2)})


@given(route=st.sampled_from(ROUTES), body=ANY | st.fixed_dictionaries({"messages": MESSAGES, "input": MESSAGES}))
def test_any_object_is_judged_or_refused(route: str, body: dict[str, Any]) -> None:
    try:
        assert judge(route, body).places >= 1
    except ApiError as error:
        assert error.status == 400


@settings(max_examples=300)
@given(route=st.sampled_from(ROUTES), message=ONE_PART)
def test_nothing_that_an_engine_would_fetch_passes(route: str, message: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": [message], "input": [message], "prompt": "x"}
    try:
        asked = judge(route, body)
        if asked.conversation is not None and asked.pictures:
            with contextlib.suppress(StopIteration):  # it never waits
                _data_urls_only(body[asked.conversation]).send(None)
    except ApiError as error:
        assert error.status == 400
        return
    except ImageError:
        return
    assert asked.places >= 1
    if asked.conversation is not None:
        for part in _parts(body[asked.conversation]):
            for name in ("image_url", "video_url", "audio_url", "source", "input_audio"):
                assert URL not in str(part.get(name)), part


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "audio_url", "audio_url": URL},
        {"type": "input_audio", "input_audio": {"data": URL, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": "data:,"}, "video_url": {"url": URL}},
        {"video_url": {"url": URL}},
        {"type": "text", "text": "x", "content": [{"type": "image_url", "image_url": {"url": URL}}]},
        {"type": "file", "file": {"file_data": URL}},
        {"type": "image", "image": URL},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ],
)
def test_parts_that_are_refused_unread(part: dict[str, Any]) -> None:
    for route in (CHAT_ROUTE, "/v1/messages", "/v1/responses", "/tokenize"):
        with pytest.raises(ApiError):
            judge(
                route, {"messages": [{"role": "user", "content": [dict(part)]}], "input": [{"content": [dict(part)]}]}
            )


def _parts(value: Any) -> list[dict[str, Any]]:
    """Every object in the contents of a conversation."""
    found: list[dict[str, Any]] = []
    if isinstance(value, list):
        for item in value:
            found += _parts(item)
    elif isinstance(value, dict):
        found.append(value)
        for name in ("content", "output"):
            found += _parts(value.get(name))
    return found


@given(content=st.binary(max_size=200) | VALUES.map(msgspec.json.encode))
def test_any_bytes_are_an_object_or_refused(content: bytes) -> None:
    try:
        assert isinstance(parse_object(content, 40), dict)
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"a": 1e999}', "body_not_json"),
        (b'{"a": NaN}', "body_not_json"),
        (b'{"a": 99999999999999999999999}', "number_too_large"),
        (b'{"a": [' + b"9" * 5000 + b"]}", "body_not_json"),
        (b"[]", "body_not_object"),
        (b"", "body_not_json"),
        (b'{"a":' * 41 + b"1" + b"}" * 41, "body_too_deep"),
        (b"[" * 100_000 + b"]" * 100_000, "body_too_deep"),
        (b"[" * 300_000, "body_too_complex"),
        (b'{"a": [' + b"0," * 1_000_001 + b"0]}", "body_too_complex"),
    ],
)
def test_bodies_that_are_refused(content: bytes, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_object(content, 40)
    assert refused.value.code == code


def test_the_last_of_equal_keys_counts() -> None:
    assert parse_object(b'{"a": 1, "a": 2}', 40) == {"a": 2}
    assert parse_object(b'{"a":' * 40 + b"1" + b"}" * 40, 40)


@pytest.mark.parametrize(
    ("route", "body", "places"),
    [
        (CHAT_ROUTE, {"messages": [{"role": "user", "content": "x"}], "n": 3}, 3),
        (COMPLETIONS_ROUTE, {"prompt": "x", "best_of": 4, "n": 2}, 4),
        (COMPLETIONS_ROUTE, {"prompt": ["x", "y"], "n": 2}, 4),
        (COMPLETIONS_ROUTE, {"prompt": [1, 2, 3]}, 1),
        (COMPLETIONS_ROUTE, {"prompt": [[1, 2], [3]]}, 2),
        ("/v1/responses", {"input": "x"}, 1),
    ],
)
def test_places_are_answers_written_at_once(route: str, body: dict[str, Any], places: int) -> None:
    assert judge(route, body).places == places


def test_what_healthy_clients_send_passes() -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"image_url": "x"}'}}
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "assistant", "content": "x", "reasoning": "y"},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"image_url": {}}}}}]
    asked = judge(CHAT_ROUTE, {"messages": messages, "tools": tools, "max_tokens": 5, "temperature": 0, "seed": None})
    assert not asked.pictures and asked.conversation == "messages"
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {"image_url": URL}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}
    judge(
        "/v1/messages", {"messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]}
    )
    items = [{"type": "function_call", "name": "look", "arguments": "{}"}, {"role": "user", "content": "x"}]
    judge("/v1/responses", {"input": [*items, {"type": "function_call_output", "call_id": "1", "output": "x"}]})


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}


def with_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(count)}}


EVERYWHERE = {
    CHAT_ROUTE: CHAT_BODY,
    COMPLETIONS_ROUTE: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": CHAT_BODY,
}


@pytest.mark.parametrize("route", EVERYWHERE)
@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("repeat_last_n", (1 << 31) - 1, "number_out_of_range"),
        ("repeat_last_n", 65_537, "number_out_of_range"),
        ("dry_penalty_last_n", 200_000_000, "number_out_of_range"),
        ("n_probs", 1_000_000, "number_out_of_range"),
        ("logprobs", 21, "number_out_of_range"),
        ("top_logprobs", -1, "number_out_of_range"),
        ("n_keep", 1 << 30, "number_out_of_range"),
        ("top_k", 1 << 30, "number_out_of_range"),
        ("min_keep", 1 << 30, "number_out_of_range"),
        ("n_indent", 1 << 30, "number_out_of_range"),
        ("n", 129, "number_out_of_range"),
        ("top_k", 1.5, "number_expected"),
        ("temperature", True, "number_expected"),
        ("temperature", "1", "number_expected"),
        ("n_predict", -1, "number_out_of_range"),
        ("max_new_tokens", -1, "number_out_of_range"),
        ("max_completion_tokens", -1, "number_out_of_range"),
        ("max_tokens", 1 << 31, "number_out_of_range"),
        ("grammar", "x" * 65_537, "value_too_large"),
        ("grammar", ["x"], "text_expected"),
        ("logit_bias", {str(token): 1 for token in range(20_000)}, "value_too_large"),
        ("samplers", ["top_k"] * 17, "value_too_large"),
        ("stop", ["x"] * 65, "value_too_large"),
        ("stop", [["x"]], "value_invalid"),
        ("stop", "x" * 1025, "value_invalid"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": with_properties(501)}},
            "value_too_large",
        ),
        ("json_schema", {"anyOf": [with_properties(500)] * 11}, "value_too_large"),
        ("tools", [{"function": {"parameters": with_properties(501)}}], "value_too_large"),
        ("lora", [{"id": 0, "scale": 1.0}], "field_not_allowed"),
        ("chat_template", "{% for i in range(1000000000) %}{% endfor %}", "field_not_allowed"),
        ("n_cmpl", 1_000_000, "field_not_allowed"),
        ("id_slot", 0, "field_not_allowed"),
        ("num_ctx", 4096, "field_not_allowed"),
    ],
)
def test_fields_that_an_engine_reserves_memory_by_are_bounded(route: str, name: str, value: Any, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        judge(route, {**EVERYWHERE[route], name: value})
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, name)
    assert name in refused.value.message


@pytest.mark.parametrize("route", EVERYWHERE)
def test_sampling_fields_within_their_bounds_pass(route: str) -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": -1, "repeat_last_n": -1,
        "dry_penalty_last_n": 65_536, "dry_multiplier": 0.8, "n_probs": 20, "stop": ["a", "b"],
        "samplers": ["top_k", "temperature"], "logit_bias": {"15": -100}, "grammar": 'root ::= "a"',
        "repetition_penalty": 1.05, "stop_token_ids": [1], "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_object"}, "json_schema": with_properties(500), "stream_options": {"include_usage": True}, "user": "me",
        "logprobs": True, "top_logprobs": 0, "tools": [], "tool_choice": "auto", "max_tokens": 5, "best_of": None,
    }  # fmt: skip
    body = {**EVERYWHERE[route], **asked}
    judge(route, body)
    assert body == {**EVERYWHERE[route], **asked}


def test_a_field_that_is_not_known_may_be_null() -> None:
    body = {**CHAT_BODY, "id_slot": None, "stop": None}
    judge(CHAT_ROUTE, body)
    assert body == {**CHAT_BODY, "stop": None}


@pytest.mark.parametrize(
    ("route", "given", "sent"),
    [
        (COMPLETIONS_ROUTE, {"n_predict": 100, "max_tokens": 2}, {"max_tokens": 2}),
        (COMPLETIONS_ROUTE, {"n_predict": 2, "max_tokens": 100}, {"max_tokens": 2}),
        (CHAT_ROUTE, {"max_new_tokens": 7}, {"max_tokens": 7}),
        (CHAT_ROUTE, {"n_predict": 7, "max_completion_tokens": 9}, {"max_completion_tokens": 7, "max_tokens": 7}),
        ("/v1/responses", {"n_predict": 7}, {"max_output_tokens": 7}),
        (CHAT_ROUTE, {"max_tokens": 2, "max_completion_tokens": 9}, {"max_tokens": 2, "max_completion_tokens": 9}),
    ],
)
def test_other_names_of_the_longest_answer_count_as_max_tokens(
    route: str, given: dict[str, int], sent: dict[str, int]
) -> None:
    body = {**EVERYWHERE[route], **given}
    judge(route, body)
    assert body == {**EVERYWHERE[route], **sent}


@pytest.mark.parametrize("one", ["x", [1]])
def test_prompts_of_one_request_are_counted(one: Any) -> None:
    assert judge(COMPLETIONS_ROUTE, {"prompt": [one] * 2048, "n": 2}).places == 4096
    with pytest.raises(ApiError) as refused:
        judge(COMPLETIONS_ROUTE, {"prompt": [one] * 2049})
    assert (refused.value.code, refused.value.param) == ("too_many_prompts", "prompt")
    assert judge(COMPLETIONS_ROUTE, {"prompt": [1] * 100_000}).places == 1  # one long prompt in tokens
