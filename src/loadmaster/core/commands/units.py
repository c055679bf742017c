"""systemd units (and Podman's ``.container`` files) and supervisor configurations -> the vLLM launch in them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct, field

from loadmaster.core.commands.docker import read_run
from loadmaster.core.commands.found import Found, mount_of
from loadmaster.core.commands.invocation import entry, find
from loadmaster.core.commands.parameters import Variables
from loadmaster.core.commands.paste import clean
from loadmaster.core.commands.shell import Shell, Simple

_SECTION = re.compile(r"\s*\[([^\]\n]+)\]\s*$")
_SUPERVISOR = re.compile(r"^\s*\[(?:program|fcgi-program|eventlistener):|^\s*\[supervisord?\]", re.MULTILINE)
_SYSTEMD = re.compile(r"^\s*\[(?:Unit|Service|Container)\]|^\s*Exec(?:Start)?\s*=", re.MULTILINE)


class Section(Struct):
    """``[name]`` and its entries in order; a key can come more than once."""

    name: str
    entries: list[tuple[str, str]] = field(default_factory=list)

    def all(self, key: str) -> list[str]:
        return [value for name, value in self.entries if name == key]

    def last(self, key: str) -> str | None:
        values = self.all(key)
        return values[-1] if values else None


def is_supervisor(text: str) -> bool:
    return _SUPERVISOR.search(text) is not None


def is_systemd(text: str) -> bool:
    return _SYSTEMD.search(text) is not None


# ---------------------------------------------------------------------------------------------- supervisor


def read_supervisor(text: str) -> Found | None:
    """The first program that runs vLLM, None if there is none."""
    return next(supervisor_launches(text), None)


def supervisor_launches(text: str) -> Iterator[Found]:
    """Every program that runs vLLM, in the file's order."""
    text, damage = clean(text)
    sections = list(_supervisor_sections(text))
    shared: dict[str, str] = {}
    for section in sections:
        if section.name == "supervisord":
            shared = _pairs(section.last("environment") or "")
    for section in sections:
        command = section.last("command")
        if not section.name.startswith("program:") or not command:
            continue
        env = {**shared, **_pairs(section.last("environment") or "")}
        found = _run(command.replace("%%", "%"), env)
        if found is not None:
            found.kind = "supervisor"
            found.name = section.name.partition(":")[2].strip() or None
            found.damage[:0] = damage
            yield found


def _supervisor_sections(text: str) -> Iterator[Section]:
    """Sections; an indented line continues the value above it, `` ;`` and `` #`` begin a comment."""
    section = Section("")
    for line in text.split("\n"):
        heading = _SECTION.match(line)
        if heading:
            yield section
            section = Section(heading.group(1).strip())
            continue
        plain = re.sub(r"(?:^|\s)[;#].*$", "", line).rstrip() if not _quoted_mark(line) else line.rstrip()
        if not plain.strip():
            continue
        if plain[0].isspace() and section.entries:
            key, value = section.entries[-1]
            section.entries[-1] = (key, f"{value}\n{plain.strip()}")
        elif "=" in plain or ":" in plain:
            key, _, value = re.split(r"([=:])", plain, maxsplit=1)
            section.entries.append((key.strip(), value.strip()))
    yield section


def _quoted_mark(line: str) -> bool:
    """Whether the first comment mark stands inside quotes, as in ``bash -c 'a; # b'``."""
    mark = re.search(r"\s[;#]", line)
    return mark is not None and line[: mark.start()].count("'") % 2 == 1


def _pairs(text: str) -> dict[str, str]:
    """``A="1",B='x,y',C=2`` over lines: quotes are taken off."""
    pattern = re.compile(r"([A-Za-z_]\w*)\s*=\s*(\"[^\"]*\"|'[^']*'|[^,\n]*)")
    found = {}
    for match in pattern.finditer(text):
        value = match.group(2).strip()
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[match.group(1)] = value.replace("%%", "%")
    return found


def _run(command: str, env: dict[str, str]) -> Found | None:
    """A command line that is split like a shell's but run without one: no ``;``, no redirection."""
    shell = Shell(command, Variables(), bare=True)
    for simple in shell.commands():
        found = find(Simple(simple.line, simple.words), Variables(env))
        if found is not None:
            found.damage.extend(shell.damage)
            return found
    return None


# ---------------------------------------------------------------------------------------------- systemd


def read_systemd(text: str) -> Found | None:
    """``ExecStart=`` of the unit, or ``Exec=`` of a container file; None if it does not run vLLM."""
    text, damage = clean(text)
    sections = list(_systemd_sections(text))
    env: dict[str, str] = {}
    for section in sections:
        for value in section.all("Environment"):
            env = {**env, **_environment(value)} if value.strip() else {}
    for section in sections:
        found = _container_file(section, env) if section.name == "Container" else None
        for command in section.all("ExecStart"):
            if found is None and command.strip():
                found = _run(_prepared(re.sub(r"^[@:+!-]+", "", command), env), env)
        if found is not None:
            found.kind = "systemd"
            found.damage[:0] = damage
            return found
    return None


def _systemd_sections(text: str) -> Iterator[Section]:
    """Sections; a backslash at the line's end continues it, comment lines in between do not end it."""
    section = Section("")
    held = ""
    for line in text.split("\n"):
        if line.lstrip().startswith(("#", ";")):
            continue
        line = line.rstrip() if not held else line.strip()
        if line.endswith("\\"):
            held += line[:-1].rstrip() + " "
            continue
        line, held = held + line, ""
        heading = _SECTION.match(line)
        if heading:
            yield section
            section = Section(heading.group(1).strip())
        elif "=" in line:
            key, _, value = line.partition("=")
            section.entries.append((key.strip(), value.strip()))
    if "=" in held:
        key, _, value = held.partition("=")
        section.entries.append((key.strip(), value.strip()))
    yield section


def _environment(value: str) -> dict[str, str]:
    """``"A=1" "B=x y" C=2``."""
    found = {}
    for simple in Shell(value.replace("$", "\\$"), bare=True).commands():
        for word in simple.words:
            name, equals, text = word.partition("=")
            if equals:
                found[name] = text
        found.update(simple.assigned)
    return found


def _prepared(command: str, env: dict[str, str]) -> str:
    """The unit's variables filled in, ``$$`` and ``%%`` made single."""
    command = command.replace("%%", "%")

    def value(match: re.Match[str]) -> str:
        if match.group() == "$$":
            return "\\$"
        return env.get(match.group(1) or match.group(2), match.group())

    return re.sub(r"\$\$|\$\{([A-Za-z_]\w*)\}|\$([A-Za-z_]\w*)", value, command)


def _container_file(section: Section, env: dict[str, str]) -> Found | None:
    image = section.last("Image")
    words: list[str] = []
    for simple in Shell(_prepared(section.last("Exec") or "", {}), bare=True).commands():
        words.extend(simple.words)
    options = [word for value in section.all("PodmanArgs") for word in value.split()]
    run = read_run([*options, image or "image"], {})
    entrypoint = section.last("Entrypoint") or run.entrypoint
    found = entry(entrypoint.split() if entrypoint else [], words, image, {**env, **run.env})
    if found is None:
        return None
    found.gpus = run.gpus
    size = section.last("ShmSize")
    found.shm_bytes = run.shm_bytes if size is None else read_run(["--shm-size", size, "image"], {}).shm_bytes
    found.ipc_host = run.ipc_host
    mounts = (mount_of(value) for value in section.all("Volume"))
    found.mounts = [*run.mounts, *(mount for mount in mounts if mount is not None)]
    return found
