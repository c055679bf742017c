"""Conversations and their pictures, kept in one SQLite file: each owner sees their own and nothing else.

Everything that belongs together is written in one transaction. Pictures are stored once by their SHA-256, whoever
sent them; an owner has a picture only after sending it, so that nobody learns what others have.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.conversation import Conversation, Message, Numbers, PictureRef, Problem, Summary
from loadmaster.edge.conversationschema import MIGRATIONS
from loadmaster.edge.conversationsearch import condition, prepare_search
from loadmaster.edge.runschema import SchemaTooNew, connect, is_damaged, set_aside
from loadmaster.edge.statehome import StateError, make_folder

UNSENT_S = 24 * 3600.0  # how long a picture stays that no message shows: it belongs to a draft
_MOST_FOUND = 200


class StoreError(Exception):
    """Nothing can be kept or read. ``code``: "storage_full", "read_only" or "storage_failed"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class QuotaError(Exception):
    """An owner has no more room. Bytes."""

    def __init__(self, quota: int, used: int, wanted: int) -> None:
        super().__init__(f"{used} + {wanted} of {quota} bytes")
        self.quota = quota
        self.used = used
        self.wanted = wanted


class Picture(Struct, frozen=True, kw_only=True):
    """A stored picture: sizes in pixels, upright; ``sent_*``: as it goes to the engine. ``size``: bytes."""

    sha256: str
    media_type: str
    size: int
    width: int
    height: int
    sent_width: int
    sent_height: int


class ConversationStore:
    """One file, used from one thread. Methods raise :class:`StoreError` for what a disk can do.

    ``quota``: bytes that one owner may keep, texts and pictures together.
    """

    def __init__(self, path: Path, quota: int, report: Callable[[str], None] = lambda text: None) -> None:
        self.path = path
        self.quota = quota
        self._report = report
        self._database: sqlite3.Connection | None = None
        self._indexed = self._opened_before = False

    def open(self) -> None:
        """Open the file and end the answers that an earlier process left unfinished."""
        with self._reading():
            pass

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    # ------------------------------------------------------------------------------------------ conversations

    def summaries(self, owner: str, search: str, limit: int, before: float | None) -> list[Summary]:
        """The newest first. ``search``: letters that the title or a message has; ``before``: older than so."""
        where: list[str] = ["owner = ?"]
        values: list[Any] = [owner]
        if before is not None:
            where.append("changed < ?")
            values.append(before)
        with self._reading() as database:
            if search:
                text, letters = condition(search, indexed=self._indexed)
                where.append(text)
                values += letters
            rows = database.execute(
                "SELECT id, title, created, changed,"
                " (SELECT count(*) FROM message WHERE conversation = conversation.id),"
                " (SELECT count(*) FROM message JOIN shown ON shown.message = message.number"
                "  WHERE conversation = conversation.id)"
                f" FROM conversation WHERE {' AND '.join(where)} ORDER BY changed DESC LIMIT ?",
                (*values, min(max(1, limit), _MOST_FOUND)),
            ).fetchall()
        return [
            Summary(id=row[0], title=row[1], created=row[2], changed=row[3], messages=row[4], pictures=row[5])
            for row in rows
        ]

    def create(self, owner: str, conversation: Conversation, pictures: Sequence[tuple[Picture, bytes]] = ()) -> None:
        """Keep a new conversation with what is in it, and the pictures that come with it, all or nothing."""
        weight = sum(picture.size for picture, _ in pictures) + sum(map(_weight, conversation.messages))
        with self._writing() as database:
            self._check_quota(database, owner, weight)
            for picture, content in pictures:
                _put(database, owner, picture, content)
            database.execute(
                "INSERT INTO conversation (id, owner, title, created, changed, settings) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    conversation.id,
                    owner,
                    conversation.title,
                    conversation.created,
                    conversation.changed,
                    _json(conversation.settings),
                ),
            )
            for message in conversation.messages:
                _add(database, owner, conversation.id, message)

    def get(self, owner: str, number: str) -> Conversation | None:
        with self._reading() as database:
            row = database.execute(
                "SELECT id, title, created, changed, settings FROM conversation WHERE owner = ? AND id = ?",
                (owner, number),
            ).fetchone()
            if row is None:
                return None
            messages = tuple(_messages(database, number))
        return Conversation(
            id=row[0],
            title=row[1],
            created=row[2],
            changed=row[3],
            settings=msgspec.json.decode(row[4]),
            messages=messages,
        )

    def change(
        self, owner: str, number: str, *, title: str | None = None, settings: dict[str, Any] | None = None
    ) -> bool:
        """Rename a conversation or keep its settings. Whether there is such a one."""
        with self._writing() as database:
            return (
                database.execute(
                    "UPDATE conversation SET title = coalesce(?, title), settings = coalesce(?, settings)"
                    " WHERE owner = ? AND id = ?",
                    (title, None if settings is None else _json(settings), owner, number),
                ).rowcount
                > 0
            )

    def delete(self, owner: str, number: str) -> bool:
        """Delete a conversation, and the pictures that no other one of the owner shows."""
        with self._writing() as database:
            shown = database.execute(
                "SELECT DISTINCT sha256 FROM message JOIN shown ON shown.message = message.number"
                " WHERE conversation = ? AND owner = ?",
                (number, owner),
            ).fetchall()
            found = database.execute("DELETE FROM conversation WHERE owner = ? AND id = ?", (owner, number)).rowcount
            if found:
                _drop_unshown(database, owner, [row[0] for row in shown])
        if found:
            self._give_back()
        return found > 0

    # ------------------------------------------------------------------------------------------ messages

    def add(
        self,
        owner: str,
        number: str,
        messages: Iterable[Message],
        *,
        after: Message | None = None,
        title: str | None = None,
        at: float,
    ) -> None:
        """Put messages at the end of a conversation. ``after``: first write it anew, take away what follows.

        Raises :class:`KeyError` when there is no such conversation or message of the owner's, and :class:`QuotaError`.
        """
        added = list(messages)
        with self._writing() as database:
            _owned(database, owner, number)
            if after is not None:
                _cut(database, number, after.id)
                _write(database, number, after)
            self._check_quota(database, owner, sum(map(_weight, added)))
            for message in added:
                _add(database, owner, number, message)
            database.execute(
                "UPDATE conversation SET changed = max(?, changed + 0.001), title = coalesce(?, title) WHERE id = ?",
                (at, title, number),
            )

    def edit(self, owner: str, number: str, message: Message, *, truncate: bool, at: float) -> None:
        """Write a message anew; ``truncate``: take away what follows it. Raises :class:`KeyError`, QuotaError."""
        with self._writing() as database:
            _owned(database, owner, number)
            if truncate:
                _cut(database, number, message.id)
            self._check_quota(database, owner, _weight(message))
            before = [row[0] for row in database.execute(_SHOWN_BY, (message.id, number)).fetchall()]
            _write(database, number, message)
            _show(database, owner, message)
            _drop_unshown(database, owner, before)
            database.execute("UPDATE conversation SET changed = max(?, changed + 0.001) WHERE id = ?", (at, number))

    def grow(self, number: str, message: Message) -> None:
        """Keep an answer as far as it has come. Nothing happens when it was deleted meanwhile."""
        with self._writing() as database:
            _write(database, number, message)

    # ------------------------------------------------------------------------------------------ pictures

    def put_picture(self, owner: str, picture: Picture, content: bytes) -> None:
        """Raises :class:`QuotaError`."""
        with self._writing() as database:
            known = database.execute(
                "SELECT 1 FROM picture WHERE owner = ? AND sha256 = ?", (owner, picture.sha256)
            ).fetchone()
            self._check_quota(database, owner, 0 if known else picture.size)
            _put(database, owner, picture, content)

    def pictures(self, owner: str, hashes: Iterable[str]) -> dict[str, Picture]:
        """Those of the owner's among them, by their hash."""
        found = {}
        with self._reading() as database:
            for sha256 in set(hashes):
                row = database.execute(
                    "SELECT sha256, media_type, size, width, height, sent_width, sent_height FROM picture"
                    " WHERE owner = ? AND sha256 = ?",
                    (owner, sha256),
                ).fetchone()
                if row is not None:
                    found[sha256] = Picture(
                        sha256=row[0],
                        media_type=row[1],
                        size=row[2],
                        width=row[3],
                        height=row[4],
                        sent_width=row[5],
                        sent_height=row[6],
                    )
        return found

    def picture_bytes(self, owner: str, sha256: str) -> bytes | None:
        with self._reading() as database:
            row = database.execute(
                "SELECT bytes FROM picture JOIN content USING (sha256) WHERE owner = ? AND sha256 = ?", (owner, sha256)
            ).fetchone()
        return None if row is None else bytes(row[0])

    # ------------------------------------------------------------------------------------------ keeping house

    def used(self, owner: str) -> int:
        """Bytes that an owner keeps."""
        with self._reading() as database:
            return _used(database, owner)

    def check(self) -> None:
        """Raise :class:`StoreError` when nothing can be written now."""
        with self._writing() as database:
            database.execute("UPDATE conversation SET changed = changed WHERE id = ''")
            database.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def sweep(self, now: float, retention_s: float | None) -> int:
        """Delete conversations that nobody touched for so long, and pictures that no message shows; how many."""
        with self._writing() as database:
            ended = []
            if retention_s is not None:
                ended = database.execute(
                    "DELETE FROM conversation WHERE changed < ? RETURNING id", (now - retention_s,)
                ).fetchall()
            dropped = database.execute(
                "DELETE FROM picture WHERE added < ? AND NOT EXISTS (SELECT 1 FROM shown"
                " WHERE shown.owner = picture.owner AND shown.sha256 = picture.sha256)",
                (now - UNSENT_S,),
            ).rowcount
            _drop_contents(database)
        if ended or dropped:
            self._give_back()
        return len(ended) + dropped

    def _give_back(self) -> None:
        """Return free pages to the file system, bounded in time."""
        with self._reading() as database:
            database.execute("PRAGMA incremental_vacuum(4096)").fetchall()

    def _check_quota(self, database: sqlite3.Connection, owner: str, more: int) -> None:
        used = _used(database, owner)
        if more > 0 and used + more > self.quota:
            raise QuotaError(self.quota, used, more)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._opened()
        except sqlite3.Error as error:
            raise self._failure(error) from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, kept whole or not at all."""
        with self._reading() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            try:
                make_folder(self.path.parent)
                self._database = self._connected()
            except sqlite3.Error as error:
                if not is_damaged(error):
                    raise
                self._set_aside(error)
                self._database = self._connected()
            except SchemaTooNew as error:
                raise StoreError("storage_failed", f"{self.path} has {error}") from None
            except StateError as error:
                code = "storage_full" if "full" in error.message else "read_only"
                raise StoreError(code, error.message) from None
            except OSError as error:
                raise StoreError("read_only", f"cannot write {self.path}: {error.strerror or error}") from None
        return self._database

    def _connected(self) -> sqlite3.Connection:
        database = connect(self.path, MIGRATIONS, check=False)
        try:
            if not self._opened_before:
                problem = Problem(code="gateway_stopped", message="the gateway stopped before the answer was whole")
                database.execute(
                    "UPDATE message SET state = 'failed', error = ? WHERE state = 'streaming'", (_json(problem),)
                )
                self._indexed = prepare_search(database)
            self._opened_before = True
        except BaseException:
            database.close()
            raise
        return database

    def _failure(self, error: sqlite3.Error) -> StoreError:
        """What a refusal of SQLite means; after it the file is opened anew."""
        text = str(error)
        self.close()
        if is_damaged(error):
            self._set_aside(error)
            return StoreError("storage_failed", "the file of conversations is damaged; a new one is begun")
        if "full" in text:
            folder = self.path.parent
            return StoreError("storage_full", f"the disk is full: make room on the file system of {folder}")
        if "readonly" in text or "unable to open" in text or "disk I/O" in text:
            return StoreError("read_only", f"{self.path} cannot be written: {text}")
        return StoreError("storage_failed", f"{self.path}: {text}")

    def _set_aside(self, error: sqlite3.Error) -> None:
        self._opened_before = False
        with contextlib.suppress(OSError):
            target = set_aside(self.path, time.strftime("%Y%m%d-%H%M%S"))
            self._report(f"{self.path.name} is damaged ({error}): it is set aside as {target.name}")


_SHOWN_BY = (
    "SELECT sha256 FROM message JOIN shown ON shown.message = message.number WHERE message.id = ? AND conversation = ?"
)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _weight(message: Message) -> int:
    return len(message.text.encode("utf-8", "replace")) + len((message.thinking or "").encode("utf-8", "replace"))


def _used(database: sqlite3.Connection, owner: str) -> int:
    pictures = database.execute("SELECT total(size) FROM picture WHERE owner = ?", (owner,)).fetchone()[0]
    texts = database.execute(
        "SELECT total(size) FROM conversation JOIN message ON message.conversation = conversation.id WHERE owner = ?",
        (owner,),
    ).fetchone()[0]
    return int(pictures + texts)


def _owned(database: sqlite3.Connection, owner: str, number: str) -> None:
    if database.execute("SELECT 1 FROM conversation WHERE owner = ? AND id = ?", (owner, number)).fetchone() is None:
        raise KeyError(number)


def _cut(database: sqlite3.Connection, number: str, last: str) -> None:
    """Take away what follows a message. Its pictures stay until they are swept: they may be asked about again."""
    row = database.execute("SELECT number FROM message WHERE id = ? AND conversation = ?", (last, number)).fetchone()
    if row is None:
        raise KeyError(last)
    database.execute("DELETE FROM message WHERE conversation = ? AND number > ?", (number, row[0]))


def _add(database: sqlite3.Connection, owner: str, number: str, message: Message) -> None:
    database.execute(
        "INSERT INTO message (id, conversation, role, text, thinking, state, error, numbers, size, created, model)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (message.id, number, message.role, *_values(message), message.created, message.model),
    )
    _show(database, owner, message)


def _write(database: sqlite3.Connection, number: str, message: Message) -> None:
    database.execute(
        "UPDATE message SET text = ?, thinking = ?, state = ?, error = ?, numbers = ?, size = ?"
        " WHERE id = ? AND conversation = ?",
        (*_values(message), message.id, number),
    )


def _values(message: Message) -> tuple[str, str | None, str, str | None, str | None, int]:
    return (
        _storable(message.text),
        None if message.thinking is None else _storable(message.thinking),
        message.state,
        None if message.error is None else _json(message.error),
        None if message.numbers is None else _json(message.numbers),
        _weight(message),
    )


def _storable(text: str) -> str:
    """Lone surrogates cannot be written as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _show(database: sqlite3.Connection, owner: str, message: Message) -> None:
    row = database.execute("SELECT number FROM message WHERE id = ?", (message.id,)).fetchone()
    database.execute("DELETE FROM shown WHERE message = ?", (row[0],))
    database.executemany(
        "INSERT INTO shown (message, place, owner, sha256, reference) VALUES (?, ?, ?, ?, ?)",
        [(row[0], place, owner, picture.sha256, _json(picture)) for place, picture in enumerate(message.pictures)],
    )


def _messages(database: sqlite3.Connection, number: str) -> Iterator[Message]:
    shown: dict[int, list[PictureRef]] = {}
    for message, reference in database.execute(
        "SELECT message, reference FROM message JOIN shown ON shown.message = message.number"
        " WHERE conversation = ? ORDER BY message, place",
        (number,),
    ):
        shown.setdefault(message, []).append(msgspec.json.decode(reference, type=PictureRef))
    for row in database.execute(
        "SELECT number, id, role, text, thinking, state, error, numbers, created, model FROM message"
        " WHERE conversation = ? ORDER BY number",
        (number,),
    ):
        yield Message(
            id=row[1],
            role=row[2],
            text=row[3],
            thinking=row[4],
            pictures=tuple(shown.get(row[0], ())),
            state=row[5],
            error=None if row[6] is None else msgspec.json.decode(row[6], type=Problem),
            numbers=None if row[7] is None else msgspec.json.decode(row[7], type=Numbers),
            created=row[8],
            model=row[9],
        )


def _put(database: sqlite3.Connection, owner: str, picture: Picture, content: bytes) -> None:
    database.execute("INSERT OR IGNORE INTO content (sha256, bytes) VALUES (?, ?)", (picture.sha256, content))
    database.execute(
        "INSERT OR REPLACE INTO picture"
        " (owner, sha256, media_type, size, width, height, sent_width, sent_height, added)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            owner,
            picture.sha256,
            picture.media_type,
            picture.size,
            picture.width,
            picture.height,
            picture.sent_width,
            picture.sent_height,
            time.time(),
        ),
    )


def _drop_unshown(database: sqlite3.Connection, owner: str, hashes: Iterable[str]) -> None:
    database.executemany(
        "DELETE FROM picture WHERE owner = ? AND sha256 = ? AND NOT EXISTS"
        " (SELECT 1 FROM shown WHERE shown.owner = picture.owner AND shown.sha256 = picture.sha256)",
        [(owner, sha256) for sha256 in hashes],
    )
    _drop_contents(database)


def _drop_contents(database: sqlite3.Connection) -> None:
    database.execute(
        "DELETE FROM content WHERE NOT EXISTS (SELECT 1 FROM picture WHERE picture.sha256 = content.sha256)"
    )
