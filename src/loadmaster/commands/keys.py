"""loadmaster keys"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from loadmaster.commands.options import json_option
from loadmaster.failure import PROBLEM, USAGE, Failure
from loadmaster.terminal import write_result


def _place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--file", "file", type=click.Path(path_type=Path), metavar="FILE", help="A file of keys, instead."
    )(command)
    return click.option(
        "--deployment", metavar="NAME", help="Whose keys; not needed when there is one deployment only."
    )(command)


@contextmanager
def _key_errors() -> Iterator[None]:
    from loadmaster.edge.statehome import StateError, WriteError
    from loadmaster.service.keys import KeysError

    try:
        yield
    except WriteError as error:
        raise Failure(error.message, error.hint, PROBLEM) from None
    except (KeysError, StateError) as error:
        raise Failure(error.message, error.hint) from None


def _file(deployment: str | None, file: Path | None) -> tuple[Path, str | None]:
    """The file of keys, and what the deployment's configuration has to say so that it counts; None: nothing."""
    from loadmaster.config import list_deployments, load_deployment
    from loadmaster.service.keys import DEFAULT_FILE, keys_path

    if file is not None:
        if deployment is not None:
            raise Failure("--file and --deployment exclude each other")
        return file, None
    if deployment is None:
        names = list_deployments()
        if len(names) != 1:
            there = f"there are: {', '.join(names)}" if names else "there is no deployment; --file names a file"
            raise Failure("whose keys? say --deployment NAME", there)
        deployment = names[0]
    loaded = load_deployment(deployment)
    stated = loaded.deployment.keys.file
    missing = None if stated is not None else f'{loaded.path}: under [keys], set file = "{DEFAULT_FILE}"'
    return keys_path(loaded.path.parent, stated or DEFAULT_FILE), missing


@click.group()
def keys() -> None:
    """API keys of the gateway: made, listed, removed; kept as hashes."""


@keys.command()
@click.argument("name")
@_place_options
@click.option("--per-minute", type=click.IntRange(1), metavar="N", help="Requests that it may make a minute.")
@click.option("--at-once", type=click.IntRange(1), metavar="N", help="Requests that it may have running.")
def add(name: str, deployment: str | None, file: Path | None, per_minute: int | None, at_once: int | None) -> None:
    """Make a key called NAME and print it, this once: only its hash is kept."""
    from loadmaster.service.keys import add_key

    with _key_errors():
        path, missing = _file(deployment, file)
        secret = add_key(path, name, requests_per_minute=per_minute, requests_at_once=at_once)
    write_result(secret + "\n")
    click.echo(f"key {name} is in {path}; it cannot be shown again", err=True)
    if missing is not None:
        click.echo(f"keys are not asked for yet: {missing}", err=True)


@keys.command(name="list")
@_place_options
@json_option
def list_keys(deployment: str | None, file: Path | None, as_json: bool) -> None:
    """The keys by name, with their limits."""
    from datetime import UTC, datetime

    from loadmaster.service.keys import read_keys

    with _key_errors():
        path, _ = _file(deployment, file)
        found = read_keys(path) if path.exists() else ()
    if as_json:
        from loadmaster.render.documents import encode

        rows = [
            {
                "name": key.name,
                "created": key.created,
                "requests_per_minute": key.requests_per_minute,
                "requests_at_once": key.requests_at_once,
            }
            for key in found
        ]
        write_result(encode({"schema": 1, "file": str(path), "keys": rows}))
        return
    if not found:
        click.echo(f"no keys in {path}; make one with: loadmaster keys add NAME", err=True)
        return
    width = max(len(key.name) for key in found)
    for key in found:
        made = datetime.fromtimestamp(key.created, UTC).strftime("%Y-%m-%d")
        limits = [
            f"{number} requests {what}"
            for number, what in ((key.requests_per_minute, "a minute"), (key.requests_at_once, "at once"))
            if number is not None
        ]
        write_result(f"{key.name:<{width}}  made {made}  {', '.join(limits) or 'no limit of its own'}\n")


@keys.command()
@click.argument("name")
@_place_options
def remove(name: str, deployment: str | None, file: Path | None) -> None:
    """Remove the key called NAME; a running gateway refuses it from the next second on."""
    from loadmaster.service.keys import remove_key

    with _key_errors():
        path, _ = _file(deployment, file)
        if not path.exists():
            raise Failure(f"there is no key {name!r}: {path} does not exist", exit_code=USAGE)
        remove_key(path, name)
    click.echo(f"key {name} is removed from {path}", err=True)
