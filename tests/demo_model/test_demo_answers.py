"""The shipped model, asked by the evaluation itself through the real engine: a small part of docs/demo-model.md's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from demo_model import evaluate
from tests.demo_model_engine import demo_engine

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with demo_engine(tmp_path_factory.mktemp("demo")) as address:
        yield address


def test_it_answers_questions_about_unseen_pictures(engine: str) -> None:
    """Six pictures of each required sort and language, half of their things in pairs that training never showed."""
    tally = evaluate.by_service(engine, evaluate.cases(6, 0), 2)
    asked, right = sum(tally.asked.values()), sum(tally.right.values())
    assert asked == 72
    assert right >= 0.85 * asked, dict(tally.wrong)
    for language in evaluate.LANGUAGES:
        assert tally.right["colour", language] >= 5
        assert tally.right["absent", language] >= 5
