"""What a deployment's settings mean for its page, and what the context leaves room for."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from loadmaster.core.contextuse import corrected, first_kept, guessed_tokens
from loadmaster.core.conversation import Message, Numbers, title_of
from loadmaster.core.deployment import Deployment, PageSection, problems
from loadmaster.service.imagepool import ImagePool
from loadmaster.service.images import ImageRules
from loadmaster.service.pagesetup import knows_switch, page_settings
from loadmaster.service.places import Places


def deployment(**fields: object) -> Deployment:
    return Deployment(name="d", model="m", page=PageSection(**fields))  # type: ignore[arg-type]


def test_the_setting_says_where_conversations_are(tmp_path: Path) -> None:
    places, pool, rules = Places(tmp_path / "deployments" / "d"), ImagePool(), ImageRules(max_images=3)
    assert page_settings(deployment(storage="off"), places, None, rules, pool, None) is None
    browser = page_settings(deployment(storage="browser"), places, None, rules, pool, None)
    assert browser is not None and browser.database is None and browser.max_images == 3
    server = page_settings(deployment(retention_days=2.0, quota_bytes=1 << 20), places, None, rules, pool, None)
    assert server is not None and server.database == str(places.conversations)
    assert (server.retention_s, server.quota_bytes) == (2 * 86400, 1 << 20)


def test_settings_that_make_no_sense_are_named() -> None:
    assert problems(deployment()) == []
    assert problems(deployment(quota_bytes=5)) == ["page.quota_bytes: 5 is under 1048576"]
    (problem,) = problems(deployment(retention_days=0.0))
    assert problem.startswith("page.retention_days: 0 is no number of days")


def test_the_switch_for_thinking_is_read_from_the_template(tmp_path: Path) -> None:
    assert knows_switch(tmp_path / "missing") is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 5}))
    assert knows_switch(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert knows_switch(tmp_path) is False
    (tmp_path / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")
    assert knows_switch(tmp_path) is True


def test_a_title_is_the_first_line_cut_between_words() -> None:
    assert title_of("\n  What   is this?\nmore") == "What is this?"
    assert title_of("word " * 30) == "word " * 11 + "word…"
    assert title_of("猫" * 100) == "猫" * 60 + "…"
    assert title_of("") == ""


def turns(*texts: str) -> list[Message]:
    return [
        Message(id=str(place), role="user" if place % 2 == 0 else "assistant", text=text)
        for place, text in enumerate(texts)
    ]


def test_the_engine_s_count_corrects_the_guesses() -> None:
    messages = turns("a" * 300, "b" * 30, "c" * 300)
    guesses = [guessed_tokens(message, 0) for message in messages]
    assert corrected(messages, guesses) == guesses
    counted = Message(id="1", role="assistant", text="b" * 30, numbers=Numbers(prompt_tokens=guesses[0] * 3 // 2))
    assert corrected([messages[0], counted, messages[2]], guesses) == [-(-guess * 3 // 2) for guess in guesses]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12), st.none() | st.integers(16, 3000), st.integers(1, 900))
def test_what_is_kept_fits_or_is_the_last_question_alone(tokens: list[int], context: int | None, answer: int) -> None:
    messages = turns(*("x" for _ in tokens))
    start = first_kept(messages, tokens, context, answer)
    last = max(place for place in range(len(tokens)) if place % 2 == 0)
    assert start % 2 == 0 and start <= last
    if context is None:
        assert start == 0
        return
    room = context - min(answer, max(1, context // 4))
    assert sum(tokens[start:]) <= room or start == last
    if start >= 2:  # nothing is left out without need
        assert sum(tokens[start - 2 :]) > room
