"""The file that runs are kept in: its tables, step by step, and how it is opened.

A release brings an older file up to its own schema; it leaves a newer one alone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

FILE = "runs.sqlite3"
BUSY_S = 5.0

# number n brings a file of schema n to n + 1; what was released is not changed any more
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE run (
        number INTEGER PRIMARY KEY AUTOINCREMENT, deployment TEXT NOT NULL, started REAL NOT NULL, ended REAL,
        message TEXT, code INTEGER, record TEXT NOT NULL, plan TEXT
    );
    CREATE INDEX run_of_deployment ON run (deployment, started);
    CREATE TABLE reconciliation (
        run INTEGER NOT NULL REFERENCES run ON DELETE CASCADE, point TEXT NOT NULL, at REAL NOT NULL,
        content TEXT NOT NULL, PRIMARY KEY (run, point)
    ) WITHOUT ROWID;
    CREATE TABLE observation (
        run INTEGER PRIMARY KEY REFERENCES run ON DELETE CASCADE, content TEXT NOT NULL
    );
    CREATE TABLE finding (
        number INTEGER PRIMARY KEY, deployment TEXT NOT NULL, code TEXT NOT NULL, since REAL NOT NULL, until REAL,
        content TEXT NOT NULL
    );
    CREATE INDEX finding_of_deployment ON finding (deployment, since);
    CREATE TABLE name (number INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
    CREATE TABLE reading (
        source INTEGER NOT NULL, at REAL NOT NULL, layout INTEGER NOT NULL, content BLOB NOT NULL,
        PRIMARY KEY (source, at)
    ) WITHOUT ROWID;
    CREATE TABLE slots (
        source INTEGER NOT NULL, step INTEGER NOT NULL, series INTEGER NOT NULL, begin INTEGER NOT NULL,
        content BLOB NOT NULL, PRIMARY KEY (source, step, series, begin)
    ) WITHOUT ROWID;
    CREATE TABLE series (
        source INTEGER NOT NULL, number INTEGER NOT NULL REFERENCES name, PRIMARY KEY (source, number)
    ) WITHOUT ROWID;
    CREATE TABLE tier (
        source INTEGER NOT NULL, step INTEGER NOT NULL, since INTEGER NOT NULL, until INTEGER NOT NULL,
        PRIMARY KEY (source, step)
    ) WITHOUT ROWID;
    CREATE TABLE forgotten (key TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
    """,
)


class SchemaTooNew(Exception):
    """The file was written by a newer release."""


def connect(path: Path, migrations: tuple[str, ...] = MIGRATIONS, *, check: bool = True) -> sqlite3.Connection:
    """Open for writing, made and brought up to date by ``migrations`` when needed.

    ``check``: look whether all of the file is sound, which reads it whole. Raises sqlite3.Error, OSError,
    SchemaTooNew.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        if schema_of(database) > len(MIGRATIONS):
            raise SchemaTooNew(f"schema {schema_of(database)} of a newer release; this one reads {len(MIGRATIONS)}")
        database.execute("PRAGMA foreign_keys = ON")
        database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA journal_size_limit = 4194304")
        migrate(database, migrations)
        found = database.execute("PRAGMA quick_check(1)").fetchone() if check else ("ok",)
        if found != ("ok",):
            raise sqlite3.DatabaseError(f"damaged: {found[0] if found else 'no answer'}")
    except BaseException:
        database.close()
        raise
    return database


def migrate(database: sqlite3.Connection, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Bring the schema up to date; each step whole or not at all."""
    while True:
        database.execute("BEGIN IMMEDIATE")
        try:
            number = schema_of(database)
            if number > len(migrations):
                raise SchemaTooNew(f"schema {number} of a newer release; this one reads up to {len(migrations)}")
            if number == len(migrations):
                database.execute("COMMIT")
                return
            for statement in migrations[number].split(";"):
                if statement.strip():
                    database.execute(statement)
            database.execute(f"PRAGMA user_version = {number + 1}")
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise


def schema_of(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def connect_for_reading(path: Path) -> sqlite3.Connection:
    """Open an existing file, which is not changed. Raises sqlite3.Error, SchemaTooNew."""
    address = path.absolute().as_uri()
    for mode in ("mode=ro", "immutable=1"):  # the second for a file in a folder that may not be written
        database = sqlite3.connect(f"{address}?{mode}", uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            if schema_of(database) > len(MIGRATIONS):
                raise SchemaTooNew("written by a newer release")
            database.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
        except sqlite3.OperationalError:
            database.close()
            if mode == "immutable=1":
                raise
        except BaseException:
            database.close()
            raise
        else:
            return database
    raise AssertionError("unreachable")


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, rather than busy, full or not to be written."""
    if isinstance(error, (sqlite3.OperationalError, sqlite3.ProgrammingError)):
        return "malformed" in str(error)
    text = str(error)
    return isinstance(error, sqlite3.DatabaseError) and any(
        word in text for word in ("not a database", "malformed", "damaged", "encrypted")
    )


def set_aside(path: Path, stamp: str) -> Path:
    """Rename a broken file and what belongs to it; returns the new place. Raises OSError."""
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    path.replace(target)
    for end in ("-wal", "-shm"):
        with contextlib.suppress(OSError):
            path.with_name(path.name + end).replace(target.with_name(target.name + end))
    return target
