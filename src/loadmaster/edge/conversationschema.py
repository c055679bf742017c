"""The file of conversations: its tables, as numbered steps that bring any older file up to date."""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE conversation (
        id TEXT PRIMARY KEY, owner TEXT NOT NULL, title TEXT NOT NULL, created REAL NOT NULL, changed REAL NOT NULL,
        settings TEXT NOT NULL DEFAULT '{}'
    ) WITHOUT ROWID;
    CREATE INDEX conversation_newest ON conversation (owner, changed);
    CREATE TABLE message (
        number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE,
        conversation TEXT NOT NULL REFERENCES conversation ON DELETE CASCADE,
        role TEXT NOT NULL, text TEXT NOT NULL, thinking TEXT, state TEXT NOT NULL, error TEXT, numbers TEXT,
        size INTEGER NOT NULL, created REAL NOT NULL, model TEXT
    );
    CREATE INDEX message_place ON message (conversation, number);
    CREATE INDEX message_size ON message (conversation, size);
    CREATE INDEX message_unfinished ON message (state) WHERE state = 'streaming';
    CREATE TABLE content (sha256 TEXT PRIMARY KEY, bytes BLOB NOT NULL);
    CREATE TABLE picture (
        owner TEXT NOT NULL, sha256 TEXT NOT NULL, media_type TEXT NOT NULL, size INTEGER NOT NULL,
        width INTEGER NOT NULL, height INTEGER NOT NULL, sent_width INTEGER NOT NULL, sent_height INTEGER NOT NULL,
        added REAL NOT NULL, PRIMARY KEY (owner, sha256)
    ) WITHOUT ROWID;
    CREATE INDEX picture_content ON picture (sha256);
    CREATE TABLE shown (
        message INTEGER NOT NULL REFERENCES message ON DELETE CASCADE, place INTEGER NOT NULL,
        owner TEXT NOT NULL, sha256 TEXT NOT NULL, reference TEXT NOT NULL, PRIMARY KEY (message, place)
    ) WITHOUT ROWID;
    CREATE INDEX shown_picture ON shown (owner, sha256);
    """,
)
