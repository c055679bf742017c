"""The search over conversations: by FTS5's trigrams where SQLite has them, letter by letter elsewhere.

Trigrams find any three letters in a row, in Chinese as in English, without words. Shorter searches, and an SQLite
without FTS5, look through the texts. The index follows the messages by triggers; it is whole exactly when those exist.
"""

from __future__ import annotations

import contextlib
import sqlite3

_LEAST_LETTERS = 3
_ESCAPED = str.maketrans({"\\": "\\\\", "%": "\\%", "_": "\\_"})
_TRIGGERS = ("search_added", "search_removed", "search_changed")
# an answer is indexed when it is whole: a text that grows twice a second would be indexed as often
_INDEX = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS search USING fts5 "
    "(text, content = 'message', content_rowid = 'number', tokenize = 'trigram')",
    "INSERT INTO search (search) VALUES ('rebuild')",
    "CREATE TRIGGER search_added AFTER INSERT ON message WHEN new.state <> 'streaming' BEGIN"
    " INSERT INTO search (rowid, text) VALUES (new.number, new.text); END",
    "CREATE TRIGGER search_removed AFTER DELETE ON message WHEN old.state <> 'streaming' BEGIN"
    " INSERT INTO search (search, rowid, text) VALUES ('delete', old.number, old.text); END",
    "CREATE TRIGGER search_changed AFTER UPDATE OF text, state ON message BEGIN"
    " INSERT INTO search (search, rowid, text)"
    " SELECT 'delete', old.number, old.text WHERE old.state <> 'streaming';"
    " INSERT INTO search (rowid, text) SELECT new.number, new.text WHERE new.state <> 'streaming'; END",
)


def prepare_search(database: sqlite3.Connection) -> bool:
    """Make the index, or take away what cannot be kept up; whether there is one. No answer may be unfinished."""
    there = database.execute(
        f"SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name IN ({', '.join('?' * len(_TRIGGERS))})",
        _TRIGGERS,
    ).fetchone()[0]
    try:
        database.execute("SELECT 1 FROM search LIMIT 0")
        if there == len(_TRIGGERS):
            return True
    except sqlite3.Error:
        pass
    database.execute("BEGIN IMMEDIATE")
    try:
        for name in _TRIGGERS:
            database.execute(f"DROP TRIGGER IF EXISTS {name}")
        database.execute("COMMIT")
        database.execute("BEGIN IMMEDIATE")
        for statement in _INDEX:
            database.execute(statement)
        database.execute("COMMIT")
    except sqlite3.OperationalError:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        return False
    return True


def condition(search: str, *, indexed: bool) -> tuple[str, list[str]]:
    """SQL that is true of a conversation whose title or messages have these letters, and its values."""
    pattern = f"%{search.translate(_ESCAPED)}%"
    title = "title LIKE ? ESCAPE '\\'"
    if indexed and len(search) >= _LEAST_LETTERS and "\0" not in search:
        phrase = '"' + search.replace('"', '""') + '"'
        return (
            f"({title} OR id IN (SELECT conversation FROM search JOIN message ON message.number = search.rowid"
            " WHERE search MATCH ?))",
            [pattern, phrase],
        )
    return (
        f"({title} OR EXISTS (SELECT 1 FROM message WHERE conversation = conversation.id"
        " AND message.text LIKE ? ESCAPE '\\'))",
        [pattern, pattern],
    )
