"""The store of conversations: owners apart, pictures once, bounds, and disks that do not take it."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadmaster.core.conversation import Conversation, Message, PictureRef
from loadmaster.edge.conversations import UNSENT_S, ConversationStore, Picture, QuotaError, StoreError
from loadmaster.edge.conversationschema import MIGRATIONS

CONTENT = b"x" * 1000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ConversationStore]:
    opened = ConversationStore(tmp_path / "c.db", 100_000)
    opened.open()
    yield opened
    opened.close()


def conversation(number: str, *texts: str, at: float = 1.0, pictures: tuple[str, ...] = ()) -> Conversation:
    shown = tuple(PictureRef(sha256=one, width=1, height=1) for one in pictures)
    messages = tuple(
        Message(id=f"{number}-{place}", role="user" if place % 2 == 0 else "assistant", text=text, pictures=shown)
        for place, text in enumerate(texts)
    )
    return Conversation(id=number, title=f"Title {number}", created=at, changed=at, messages=messages)


def picture(sha256: str, size: int = len(CONTENT)) -> Picture:
    return Picture(sha256=sha256, media_type="image/png", size=size, width=1, height=1, sent_width=1, sent_height=1)


def contents(store: ConversationStore) -> int:
    with sqlite3.connect(store.path) as database:
        count: int = database.execute("SELECT count(*) FROM content").fetchone()[0]
    database.close()
    return count


def test_what_is_kept_comes_back_and_belongs_to_its_owner(store: ConversationStore) -> None:
    store.create("ann", conversation("a", "hello", "hi"))
    found = store.get("ann", "a")
    assert found is not None and [one.text for one in found.messages] == ["hello", "hi"]
    assert store.get("bo", "a") is None and store.summaries("bo", "", 50, None) == []
    assert not store.change("bo", "a", title="mine") and not store.delete("bo", "a")
    with pytest.raises(KeyError):
        store.add("bo", "a", [Message(id="x", role="user")], at=2.0)
    assert store.change("ann", "a", title="New") and store.summaries("ann", "", 50, None)[0].title == "New"
    assert store.delete("ann", "a") and store.get("ann", "a") is None


def test_a_search_finds_letters_of_any_script_and_no_pattern(store: ConversationStore) -> None:
    store.create("", conversation("a", "桌上的猫是灰色的", at=1.0))
    store.create("", conversation("b", "The Cat sat, 100% sure_ly", at=2.0))
    store.create("", conversation("c", "nothing' OR 1=1 --", at=3.0))

    def found(text: str) -> list[str]:
        return [one.id for one in store.summaries("", text, 50, None)]

    assert found("猫") == ["a"] and found("灰色") == ["a"] and found("cat") == ["b"]
    assert found("%") == ["b"] and found("_") == ["b"] and found("100% s") == ["b"]
    assert found("' OR 1=1") == ["c"] and found("'; DROP TABLE conversation; --") == [] and found("\\") == []
    assert found("title a") == ["a"]
    assert found("") == ["c", "b", "a"]
    assert [one.id for one in store.summaries("", "", 1, 3.0)] == ["b"]


def test_the_index_follows_what_is_written_and_is_made_anew_when_it_could_not(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "c.db", 1 << 20)
    store.create("", conversation("a", "question"))
    growing = Message(id="m", role="assistant", text="a zebra", state="streaming")
    store.add("", "a", [growing], at=2.0)

    def found(text: str) -> bool:
        return bool(store.summaries("", text, 50, None))

    assert not found("zebra")  # not while it grows
    store.grow("a", Message(id="m", role="assistant", text="a zebra on the 草地上"))
    assert found("zebra") and found("ZEBRA on") and found("草地上") and not found('"zebra')
    store.edit("", "a", Message(id="m", role="assistant", text="a lion"), truncate=False, at=3.0)
    assert found("lion") and not found("zebra")
    database = store._opened()
    database.execute("DROP TRIGGER search_added")  # as an SQLite without FTS5 leaves it
    store.add("", "a", [Message(id="n", role="user", text="a giraffe")], at=4.0)
    store.close()
    store = ConversationStore(tmp_path / "c.db", 1 << 20)
    store.open()
    assert found("giraffe") and found("lion")
    store.delete("", "a")
    assert not found("giraffe")
    store.close()


def test_pictures_are_stored_once_and_go_with_the_last_that_shows_them(store: ConversationStore) -> None:
    for owner in ("ann", "bo"):
        store.put_picture(owner, picture("p"), CONTENT)
        store.put_picture(owner, picture("p"), CONTENT)
    assert contents(store) == 1
    store.create("ann", conversation("a", "one", pictures=("p",)))
    store.create("ann", conversation("b", "two", pictures=("p",)))
    store.create("bo", conversation("c", "three", pictures=("p",)))
    store.delete("ann", "a")
    assert store.picture_bytes("ann", "p") == CONTENT
    store.delete("ann", "b")
    assert store.picture_bytes("ann", "p") is None and store.picture_bytes("bo", "p") == CONTENT
    store.delete("bo", "c")
    assert contents(store) == 0


def test_a_draft_keeps_its_picture_for_a_day(store: ConversationStore) -> None:
    store.put_picture("", picture("p"), CONTENT)
    store.create("", conversation("a", "one", at=time.time()))
    assert store.sweep(time.time(), 3600.0) == 0 and store.picture_bytes("", "p") == CONTENT
    assert store.sweep(time.time() + UNSENT_S + 1, None) == 1 and contents(store) == 0
    assert store.get("", "a") is not None
    assert store.sweep(time.time() + 7200, 3600.0) == 1 and store.get("", "a") is None


def test_the_quota_counts_bytes_of_texts_and_pictures(store: ConversationStore) -> None:
    store.create("", conversation("a", "猫" * 10))
    assert store.used("") == 30
    store.put_picture("", picture("p", 99_000), b"y" * 99_000)
    with pytest.raises(QuotaError) as caught:
        store.put_picture("", picture("q"), CONTENT)
    assert (caught.value.quota, caught.value.used, caught.value.wanted) == (100_000, 99_030, 1000)
    with pytest.raises(QuotaError):
        store.add("", "a", [Message(id="m", role="user", text="z" * 1000)], at=2.0)
    store.put_picture("bo", picture("q"), CONTENT)  # each owner has their own room
    store.put_picture("", picture("p", 99_000), b"y" * 99_000)  # what is there already costs nothing


def test_what_follows_a_message_is_taken_away(store: ConversationStore) -> None:
    store.create("", conversation("a", "1", "2", "3", "4"))
    store.add(
        "",
        "a",
        [Message(id="new", role="assistant", text="2b")],
        after=Message(id="a-0", role="user", text="One"),
        at=2.0,
    )
    found = store.get("", "a")
    assert found is not None and [one.text for one in found.messages] == ["One", "2b"]
    with pytest.raises(KeyError):
        store.add("", "a", [Message(id="no", role="user")], after=Message(id="a-3", role="user"), at=2.0)
    store.edit("", "a", Message(id="a-0", role="user", text="1b"), truncate=True, at=3.0)
    found = store.get("", "a")
    assert found is not None and [one.text for one in found.messages] == ["1b"]


def test_an_unfinished_answer_has_failed_after_a_restart(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "c.db", 100_000)
    store.create("", conversation("a", "one"))
    store.add("", "a", [Message(id="m", role="assistant", text="so far", state="streaming")], at=2.0)
    store.close()
    again = ConversationStore(tmp_path / "c.db", 100_000)
    again.open()
    found = again.get("", "a")
    again.close()
    assert found is not None and found.messages[-1].text == "so far"
    assert found.messages[-1].state == "failed" and found.messages[-1].error is not None


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = ConversationStore(tmp_path / "file" / "c.db", 1000)
    with pytest.raises(StoreError) as caught:
        store.open()
    assert caught.value.code == "read_only" and "c.db" not in caught.value.message.partition("cannot")[0]


def test_a_full_disk_is_said_and_what_was_kept_stays(tmp_path: Path) -> None:
    store = ConversationStore(tmp_path / "c.db", 10_000_000)
    store.create("", conversation("a", "kept"))
    pages = store._opened().execute("PRAGMA page_count").fetchone()[0]
    store._opened().execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own words for a disk that is full
    with pytest.raises(StoreError) as caught:
        store.put_picture("", picture("p", 500_000), b"y" * 500_000)
    assert caught.value.code == "storage_full" and "make room" in caught.value.message
    found = store.get("", "a")  # opened anew: there is room again
    assert found is not None and found.messages[0].text == "kept"
    store.check()
    store.close()


def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"this is no database, " * 500)
    said: list[str] = []
    store = ConversationStore(path, 1000, said.append)
    store.open()
    store.create("", conversation("a", "new"))
    store.close()
    assert len(said) == 1 and "set aside" in said[0] and list(tmp_path.glob("c.db.damaged-*"))


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "c.db")
    database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    with pytest.raises(StoreError, match="newer release"):
        ConversationStore(tmp_path / "c.db", 1000).open()


TEXTS = st.text(max_size=30)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=5), TEXTS)
def test_any_text_comes_back_and_is_found_by_its_letters(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[str, str]], search: str
) -> None:
    store = ConversationStore(tmp_path_factory.mktemp("texts") / "c.db", 1 << 30)
    for place, pair in enumerate(turns):
        store.create("", conversation(str(place), *pair, at=float(place)))
    for place, pair in enumerate(turns):
        found = store.get("", str(place))
        assert found is not None and tuple(one.text for one in found.messages) == pair
    found_ids = {one.id for one in store.summaries("", search, 50, None)}
    for place, pair in enumerate(turns):
        if "\0" not in search and any(search in text and "\0" not in text for text in pair):
            assert str(place) in found_ids
    store.close()
