"""Reads a launch from text or a file: a command, a compose file, a manifest, a unit, a YAML configuration.

YAML is parsed here, with limits on its size, depth and aliases; what it means is decided in ``core.commands``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from loadmaster.core.commands import CommandError, Found
from loadmaster.core.commands.compose import compose_launches
from loadmaster.core.commands.found import NoSuchService, choose
from loadmaster.core.commands.invocation import MENTION
from loadmaster.core.commands.kubernetes import kubernetes_launches
from loadmaster.core.commands.paste import check_size, clean
from loadmaster.core.commands.settingsfile import is_settings, read_settings
from loadmaster.core.commands.text import read_shell_text
from loadmaster.core.commands.units import is_supervisor, is_systemd, read_supervisor, read_systemd, supervisor_launches
from loadmaster.core.facts import Evidence, LaunchArgs
from loadmaster.edge.regularfile import open_to_read

__all__ = ["CommandError", "read_command", "read_command_file"]

MAX_YAML = 300_000  # characters
MAX_YAML_EVENTS = 60_000
MAX_YAML_DEPTH = 60
MAX_YAML_ALIASES = 500
MAX_YAML_NODES = 200_000  # with every alias counted as often as it is used

_YAML_LINE = re.compile(r"\s*(?:---|%YAML\b.*|[\"']?[A-Za-z_][\w.-]*[\"']?\s*:(?:\s.*)?|-\s+[\w\"'-].*|[{\[].*)\s*")
_YAML_NAMES = (".yaml", ".yml", ".json")


def read_command(
    text: str, name_hint: str | None = None, *, engine_version: str | None = None, service: str | None = None
) -> LaunchArgs:
    """The launch that ``text`` holds. Nothing of it is run.

    ``name_hint``: the file's name, if it had one; its suffix says what to try first. ``engine_version`` goes before
    the version that an image's tag names, and the result carries it. ``service``: which of several launches of a
    compose file, a manifest or a supervisor's configuration; the first if None. Raises :class:`CommandError`.
    """
    check_size(text)
    try:
        found = _read(text, (name_hint or "").lower(), service)
        if service is not None and found.name != service:
            raise CommandError(f"the text has no service {service!r}", "leave --service out")
        return found.launch(engine_version)
    except RecursionError:
        raise CommandError("the text is too deeply nested", "give the command alone") from None


def read_command_file(path: str | Path, *, engine_version: str | None = None, service: str | None = None) -> LaunchArgs:
    """The launch in a file. Raises :class:`CommandError`, also when the file cannot be read."""
    path = Path(path)
    try:
        with open_to_read(path) as file:
            raw = file.read(8_000_001)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot read {path}: {reason}", "give the path of a text file") from None
    if len(raw) > 8_000_000:
        raise CommandError(f"{path} has more than 8 MB, so it is no command", "give the command alone")
    return read_command(_decoded(raw, path), path.name, engine_version=engine_version, service=service)


def _decoded(raw: bytes, path: Path) -> str:
    """UTF-8, or UTF-16 with its mark (as PowerShell's redirection writes it)."""
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError:
        if b"\0" in raw:
            raise CommandError(f"{path} is no text file", "give the command as plain text") from None
        return raw.decode("latin-1")


def _read(text: str, name: str, service: str | None) -> Found:
    if not text.strip():
        raise CommandError("the text is empty", "give a `vllm serve ...` line or a file that holds one")
    if is_supervisor(text) and (programs := list(supervisor_launches(text))):
        return choose(programs, service) or programs[0]
    if is_systemd(text) and (found := read_systemd(text)):
        return found
    looks_like_yaml = name.endswith(_YAML_NAMES) or _first_line_is_yaml(text)
    problem: CommandError | None = None
    if looks_like_yaml:
        try:
            found = _read_yaml(text, service)
            if found is not None:
                return found
        except NoSuchService:
            raise
        except CommandError as error:
            problem = error
    try:
        found = read_shell_text(text, _document)
    except CommandError:
        if problem is not None:
            raise problem from None
        raise
    if problem is not None and re.search(r"^\s*(?:services|apiVersion|containers)\s*:", text, re.MULTILINE):
        found.damage.insert(0, Evidence("command", problem.message))
    return found


def _first_line_is_yaml(text: str) -> bool:
    for line in text.split("\n"):
        if line.strip() and not line.lstrip().startswith("#") and not line.startswith("```"):
            return _YAML_LINE.fullmatch(line.strip("\ufeff\r")) is not None
    return False


def _document(text: str) -> Found | None:
    """What a here-document holds, if it is one of the files that we know."""
    try:
        if is_supervisor(text):
            return read_supervisor(text)
        if is_systemd(text):
            return read_systemd(text)
        return _read_yaml(text) if _first_line_is_yaml(text) else None
    except CommandError:
        return None


# ---------------------------------------------------------------------------------------------- YAML


def _read_yaml(text: str, service: str | None = None) -> Found | None:
    """The launch in a YAML text, None if there is none in it. Raises :class:`CommandError` if it is no YAML."""
    text, damage = clean(text)
    text = re.sub(r"^\s*```.*$", "", text, flags=re.MULTILINE).replace("\t", "  ")
    try:
        documents = list(_load(text, _TextLoader))
    except CommandError:
        if "{{" not in text:
            raise
        text = _without_templates(text)
        documents = list(_load(text, _TextLoader))
    launches: list[Found] = []
    for document in documents:
        launches += list(compose_launches(document)) or list(kubernetes_launches(document))
    found = choose(launches, service) if launches else None
    if found is None:
        for document in _load(text, _TypedLoader):
            if is_settings(document):
                found = read_settings(document)
                break
    if found is None:
        found = _in_strings([document for document in documents if isinstance(document, dict | list)])
    if found is not None:
        found.damage[:0] = damage
    return found


def _without_templates(text: str) -> str:
    """A Helm template as plain YAML: steering lines are dropped, ``{{ .Values.x }}`` becomes ``$(.Values.x)``."""
    text = re.sub(r"^\s*\{\{-?\s*(?:if|else|end|with|range|include|toYaml|define|/\*).*$", "", text, flags=re.MULTILINE)
    return re.sub(
        r"\{\{-?\s*([^{}\n\"']*?)\s*-?\}\}", r"$(\1)", re.sub(r"\{\{[^{}\n]*[\"'][^{}\n]*\}\}", "$(template)", text)
    )


def _in_strings(documents: list[Any]) -> Found | None:
    """The launch in a text that some other kind of document holds (a script in a ConfigMap, ``cmd:``, ``run:``)."""
    for text in _strings(documents, 0):
        if MENTION.search(text) or re.search(r"\bdocker\s+run\b", text):
            try:
                found = read_shell_text(text)
            except CommandError:
                continue
            found.kind = "other"
            return found
    return None


def _strings(node: Any, depth: int) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list) and depth <= MAX_YAML_DEPTH:
        for item in node.values() if isinstance(node, dict) else node:
            yield from _strings(item, depth + 1)


_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _TextLoader(_Base):  # type: ignore[misc]
    """Scalars stay text as the file spells them; only null is None."""


_TextLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _TypedLoader(_Base):  # type: ignore[misc]
    """The types that vLLM's own reader gives, dates left as text."""


_TypedLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _any_tag(loader: Any, suffix: str, node: yaml.Node) -> Any:
    """An unknown tag (``!reset``, ``!Ref x``) is put aside, its value is kept."""
    if isinstance(node, yaml.ScalarNode):
        return loader.construct_scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_mapping(node, deep=True)


for _loader in (_TextLoader, _TypedLoader):
    _loader.add_multi_constructor("!", _any_tag)


def _load(text: str, loader: Any) -> Iterator[Any]:
    """The documents of a YAML text, within the limits. Raises :class:`CommandError`."""
    if len(text) > MAX_YAML:
        raise CommandError(f"the YAML has more than {MAX_YAML:,} characters", "give the part with the vLLM service")
    try:
        _check_events(text)
        for node in yaml.compose_all(text, Loader=loader):
            if node is None:
                continue
            _check_nodes(node)
            constructor = loader("")
            try:
                yield constructor.construct_document(node)
            finally:
                constructor.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1})" if mark else ""
        raise CommandError(f"the YAML cannot be parsed: {error.problem or error.context}{where}", _YAML_HINT) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CommandError(
            f"the YAML cannot be parsed: {str(error)[:200] or type(error).__name__}", _YAML_HINT
        ) from None


_YAML_HINT = "check the indentation, or paste the command alone"


def _check_events(text: str) -> None:
    depth = aliases = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Base)):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
        if depth > MAX_YAML_DEPTH or count > MAX_YAML_EVENTS or aliases > MAX_YAML_ALIASES:
            raise CommandError("the YAML is too deep or has too many parts", "give the part with the vLLM service")


def _check_nodes(root: yaml.Node) -> None:
    """Refuses a document that its aliases blow up (or that holds itself)."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known is not None:
            if known < 0:
                raise CommandError("the YAML refers to itself", "give the part with the vLLM service")
            return known
        sizes[id(node)] = -1
        total = 1
        if isinstance(node, yaml.SequenceNode):
            total += sum(size(item) for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            total += sum(size(key) + size(value) for key, value in node.value)
        if total > MAX_YAML_NODES:
            raise CommandError("the YAML's aliases blow it up", "give the part with the vLLM service")
        sizes[id(node)] = total
        return total

    size(root)
