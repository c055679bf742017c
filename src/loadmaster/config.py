"""``loadmaster.toml``: reading it with the origin of every value, and writing it.

Precedence: the environment (``LOADMASTER_SECTION_KEY``, ``LOADMASTER_KEY`` for keys without a section), the file,
the defaults. Unknown keys and wrong types are refused, with the place and what was expected.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from loadmaster.core.configvalues import SettingError, convert, from_text, near
from loadmaster.core.deployment import RUN_VARIABLE, SCHEMA, Deployment, problems
from loadmaster.core.deploymentfile import deployment_text, is_section, setting_keys, setting_type, toml_value
from loadmaster.core.keypaths import key_lines, line_of
from loadmaster.core.migrations import SchemaError, migrate, schema_of
from loadmaster.edge import statehome
from loadmaster.edge.statehome import CONFIGURATION, StateError

__all__ = [
    "CONFIGURATION",
    "ConfigError",
    "Loaded",
    "change_value",
    "deployment_folder",
    "list_deployments",
    "load_deployment",
    "read_deployment",
    "state_home",
    "write_deployment",
]

ConfigError = StateError  # one class: folders and their files are refused in the same words
state_home = statehome.state_home
deployment_folder = statehome.deployment_folder
list_deployments = statehome.list_deployments

LIMIT_BYTES = 256 << 10  # a configuration has about 5 KiB; a larger file is some other file
PREFIX = "LOADMASTER_"
_NOT_OVERRIDDEN = ("schema", "name")
_OTHER_VARIABLES = ("LOADMASTER_HOME", "LOADMASTER_FOLDER", RUN_VARIABLE)
DEFAULT = "default"
# The standard library's parser takes time squared for keys of many parts; no setting has more than three.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){64}""")


class Loaded(Struct, frozen=True, kw_only=True):
    """A deployment and where each value comes from: "default", "environment VARIABLE", "file NAME line N".

    ``origins`` has every key ("engine.port"). ``migrated_from``: the schema that the file had, when an older one.
    """

    deployment: Deployment
    origins: dict[str, str]
    path: Path
    migrated_from: int | None = None


def load_deployment(name: str, environment: Mapping[str, str] | None = None) -> Loaded:
    """The configuration of a deployment. Raises :class:`ConfigError`.

    A file of an older schema is rewritten, the old one kept beside it as ``loadmaster.toml.bak``; where it cannot
    be rewritten it is read as it is.
    """
    path = deployment_folder(name) / CONFIGURATION
    if not path.is_file():
        known = list_deployments()
        close = difflib.get_close_matches(name, known, 1)
        there = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}" if known else None
        raise ConfigError(f"no deployment {name!r}", there or f"make one with: loadmaster init {name} --model MODEL")
    loaded = read_deployment(path, environment)
    if loaded.deployment.name != name:
        raise ConfigError(
            f"{path}: name is {loaded.deployment.name!r}, but the folder is {name!r}",
            f'set name = "{name}" in the file',
        )
    if loaded.migrated_from is not None:
        _rewrite(path)
    return loaded


def read_deployment(path: Path, environment: Mapping[str, str] | None = None) -> Loaded:
    """The configuration in one file, which is not changed. Raises :class:`ConfigError`."""
    text = _text(path)
    try:
        raw, migrated_from = _current(_parse(path, text))
    except SchemaError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from None
    lines = key_lines(text)
    origins = dict.fromkeys(setting_keys(), DEFAULT)
    for key in _given(raw):
        line = line_of(tuple(key.split(".")), lines)
        origins[key] = f"file {path.name}" + (f" line {line}" if line is not None else f", from schema {migrated_from}")
    environment = os.environ if environment is None else environment
    for variable, key, value in _overrides(environment):
        _set(raw, key, value)
        origins[key] = f"environment {variable}"
    try:
        values = convert(raw, Deployment)
    except SettingError as problem:
        raise ConfigError(_placed(path, problem.key, str(problem), origins, lines), problem.hint) from None
    deployment = msgspec.convert(values, Deployment)
    wrong = problems(deployment)
    if wrong:
        said = [_placed(path, sentence.split(":", 1)[0], sentence, origins, lines) for sentence in wrong]
        raise ConfigError("\n       ".join(said))
    return Loaded(deployment=deployment, origins=origins, path=path, migrated_from=migrated_from)


def write_deployment(
    deployment: Deployment,
    *,
    notes: Mapping[str, str] | None = None,
    overwrite: bool = False,
    folder: Path | None = None,
) -> Path:
    """Writes ``loadmaster.toml`` with its comments and returns its path. Raises :class:`ConfigError`.

    ``notes``: a key, or a flag of ``engine.flags``, → a sentence that goes above it. ``folder``: instead of the
    deployment's own. An existing file is kept unless ``overwrite``, and then it stays as ``loadmaster.toml.bak``.
    """
    wrong = problems(deployment)
    if wrong:
        raise ConfigError("\n       ".join(wrong))
    path = (folder or deployment_folder(deployment.name)) / CONFIGURATION
    content = deployment_text(deployment, notes or {}).encode("utf-8")
    if path.exists():
        if not overwrite:
            raise ConfigError(f"{path} exists already", "loadmaster init --force writes it anew and keeps a .bak")
        _keep(path)
    statehome.write_file(path, content)
    return path


def change_value(path: Path, key: str, value: Any) -> None:
    """Sets one key in a file and leaves every other line, comments too, as it is. Raises :class:`ConfigError`.

    A file in which the key cannot be reached by lines (an inline table) is written anew, the old one kept as .bak.
    """
    text = _text(path)
    section, _, name = key.rpartition(".")
    lines = key_lines(text)
    rows = text.split("\n")
    here = lines.get(tuple(key.split(".")))
    written = f"{name} = {toml_value(value)}"
    if here is not None and _is_one_line(rows[here - 1], name):
        rows[here - 1] = written
    elif here is None and section and (section,) in lines and rows[lines[(section,)] - 1].lstrip().startswith("["):
        rows.insert(lines[(section,)], written)
    else:
        raw = _current(_parse(path, text))[0]
        _set(raw, key, value)
        write_deployment(msgspec.convert(convert(raw, Deployment), Deployment), overwrite=True, folder=path.parent)
        return
    changed = "\n".join(rows)
    _parse(path, changed)
    statehome.write_file(path, changed.encode("utf-8"))


def _is_one_line(row: str, name: str) -> bool:
    """Whether a line holds this key and its whole value, a plain text or number, and no comment to be lost."""
    return re.fullmatch(rf"""\s*{re.escape(name)}\s*=\s*("[^"\\]*"|'[^']*'|[\w.+-]+)\s*""", row) is not None


# ---------------------------------------------------------------------------------------------- the file


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None
    if len(content) > LIMIT_BYTES:
        raise ConfigError(f"{path}: more than {LIMIT_BYTES >> 10} KiB, which is no configuration")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line} is not UTF-8 text", "save the file as UTF-8") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    long_key = _LONG_KEY.search(text)
    if long_key is not None:
        raise ConfigError(f"{path}: line {text.count(chr(10), 0, long_key.start()) + 1}: a key of too many parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except ValueError as error:  # also numbers of thousands of digits
        said = str(error)
        raise ConfigError(f"{path}: not TOML: {said[:1].lower()}{said[1:200]}") from None


def _current(raw: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
    schema = schema_of(raw)
    if schema == SCHEMA:
        return raw, None
    return migrate(raw), schema


def _rewrite(path: Path) -> None:
    """The file in the current schema, from the file alone: what the environment says does not belong into it."""
    try:
        write_deployment(read_deployment(path, {}).deployment, overwrite=True, folder=path.parent)
    except ConfigError:
        return  # read-only, or incomplete without the environment: it is migrated again when it is read again


def _keep(path: Path) -> None:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(*statehome.write_problem(error, path, "read")) from None
    statehome.write_file(path.with_name(f"{path.name}.bak"), content)


def _placed(path: Path, key: str, sentence: str, origins: Mapping[str, str], lines: dict[tuple[str, ...], int]) -> str:
    """The sentence with where the value stands in front: file and line, or the variable."""
    origin = origins.get(key, "")
    if origin.startswith("environment "):
        return f"{origin}: {sentence}"
    line = line_of(tuple(key.split("[", 1)[0].split(".")), lines)  # the list itself, for one of its items
    return f"{path}: {f'line {line}: ' if line is not None else ''}{sentence}"


# ---------------------------------------------------------------------------------------------- keys


def _given(raw: Mapping[str, Any]) -> Iterator[str]:
    known = set(setting_keys())
    for key, value in raw.items():
        if key in known:
            yield key
        elif isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value if f"{key}.{inner}" in known)


def _variables() -> dict[str, str]:
    """Variable → key, for each key that the environment may set."""
    return {PREFIX + key.upper().replace(".", "_"): key for key in setting_keys() if key not in _NOT_OVERRIDDEN}


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """(variable, key, value) of each variable that is set; an empty one counts as not set."""
    known = _variables()
    sections = tuple(
        f"{PREFIX}{field.name.upper()}_" for field in msgspec.structs.fields(Deployment) if is_section(field.type)
    )
    for variable in sorted(environment):
        if not variable.startswith(PREFIX) or variable in known or variable in _OTHER_VARIABLES:
            continue
        close = near(variable, known, 0.88)
        if close is not None or variable.startswith(sections):
            hint = f"did you mean {close}?" if close else "loadmaster config NAME lists the settings"
            raise ConfigError(f"environment {variable}: no such setting", hint)
    for variable, key in known.items():
        text = environment.get(variable, "")
        if text:
            try:
                yield variable, key, from_text(text, key, setting_type(key))
            except SettingError as problem:
                raise ConfigError(f"environment {variable}: {problem}", problem.hint) from None


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    if not section:
        raw[name] = value
        return
    inner = raw.get(section)
    raw[section] = {**inner, name: value} if isinstance(inner, dict) else {name: value}
