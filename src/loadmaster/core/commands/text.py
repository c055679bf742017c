"""A pasted shell text -> the launch in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from loadmaster.core.commands import windows
from loadmaster.core.commands.arithmetic import with_arithmetic
from loadmaster.core.commands.docker import run_start
from loadmaster.core.commands.dockerfile import is_dockerfile, read_dockerfile
from loadmaster.core.commands.found import CUT, CommandError, Found
from loadmaster.core.commands.invocation import MENTION, find, find_in_text, known_flags_in
from loadmaster.core.commands.nothing import explain, other_engine
from loadmaster.core.commands.parameters import Variables
from loadmaster.core.commands.paste import clean, without_prompts
from loadmaster.core.commands.shell import Shell, Simple
from loadmaster.core.facts import Evidence

_LAUNCH_LINE = re.compile(r"vllm\s+serve\b|vllm\.entrypoints\.|\b(?:docker|podman|nerdctl)\s+(?:container\s+)?run\b")
_SETTING_LINE = re.compile(r"\s*(?:export\s+)?[A-Za-z_]\w*=")
_COMMENTED = re.compile(r"^(\s*)#\s?(?=\S)", re.MULTILINE)

_CONTINUED_RETURN = re.compile(r"\\\r\n")
_MOST_BREAKS = 30
_MOST_FURTHER = 20
_LONGEST_REPAIR = 20_000  # characters

Reader = Callable[[str], Found | None]


def read_shell_text(text: str, read_document: Reader | None = None) -> Found:
    """The launch in a pasted text. Raises :class:`CommandError` if there is none.

    ``read_document`` reads what a here-document holds (a compose file, a manifest), None if it is no such thing.
    """
    returned = _CONTINUED_RETURN.search(text)
    before = text[: returned.start()].count("\n") + 1 if returned else 0
    text, damage = clean(text)
    text = with_arithmetic(text)
    found = _first(text, read_document, 0)
    if found is None:
        raise explain(without_prompts(text))
    if found.kind == "other" and other_engine(without_prompts(text)) is not None:
        raise explain(without_prompts(text))
    found.damage[:0] = damage
    if windows.dialect(text) == "posix":
        if before and found.command:
            words = "a carriage return behind the backslash (Windows line ends): a shell does not join such lines"
            found.damage.insert(0, Evidence("command", words, before))
        plain = without_prompts(text)
        with suppress(CommandError):  # what cannot be read beside the launch leaves the launch as it is
            if found.damage:
                _put_right(found, plain)
            if found.command and len(_LAUNCH_LINE.findall(plain)) > 1:
                found.others = list(_further(plain))
    return found


def _first(text: str, read_document: Reader | None, depth: int) -> Found | None:
    dialect = windows.dialect(text)
    if dialect != "posix":
        found = _windows(text, dialect)
        if found is not None:
            return found
    if depth == 0 and is_dockerfile(text) and (found := read_dockerfile(text)) is not None:
        return found
    plain = without_prompts(text)
    shell = Shell(plain)
    found = _posix(shell)
    if found is not None:
        return found
    for body in shell.heredocs[:20] if depth < 3 else ():
        found = read_document(body) if read_document else None
        found = found or _first(body, read_document, depth + 1)
        if found is not None:
            return found
    return (
        _from_launch_line(plain)
        or _in_variables(shell)
        or _listed_words(plain)
        or _broken(shell, plain)
        or _lone_flags(plain)
        or _uncommented(text)
    )


def _windows(text: str, dialect: str) -> Found | None:
    plain = without_prompts(text, "^" if dialect == "cmd" else "`")
    reading = windows.Reading(plain, dialect)
    for command in reading.commands():
        found = find(command, reading.variables)
        if found is not None:
            found.damage.extend(reading.damage)
            return found
    return None


def _posix(shell: Shell) -> Found | None:
    """The first launch, and whether flags stand orphaned on the lines below it."""
    found: Found | None = None
    bare: Found | None = None  # a launch that is given no words: meant only if the words were lost
    cut = False  # a container command that ends before its image
    for command in shell.commands():
        orphan = command.words[0]
        below = command.after == "\n" and re.match(r"--?[A-Za-z]", orphan) is not None
        if below and (found or bare or cut):
            _report_orphan(shell, orphan, command.line)
        if found is not None:
            break
        if bare is not None and shell.damage:
            break
        bare = None
        candidate = find(command, shell.variables)
        if candidate is not None:
            candidate.command = [*(f"{name}={value}" for name, value in command.assigned.items()), *command.words]
        if candidate is not None and (candidate.words or candidate.kind == "module" or candidate.image):
            found = candidate
        else:
            bare = candidate
            cut = candidate is None and run_start(command.words) is not None
    found = found or (bare if shell.damage else None)
    if found is not None:
        found.damage.extend(shell.damage)
    return found


def _further(text: str) -> Iterator[str]:
    """Where launches of the text stand after the first one."""
    seen = 0
    for command in (shell := Shell(text)).commands():
        candidate = find(command, shell.variables)
        if candidate is None or not candidate.words:
            continue
        seen += 1
        if 1 < seen <= _MOST_FURTHER:
            model = candidate.launch().model
            yield f"the command on line {command.line}" + (f" ({model})" if model else "")


def _report_orphan(shell: Shell, orphan: str, line: int) -> None:
    """A flag at the beginning of a line that continues none, unless the line above is reported already."""
    lines = shell.text.split("\n")
    above = _line_above(lines, line)
    if any(above <= number < line for number in shell.breaks):
        return
    shell.breaks[line] = "orphan"
    name = orphan.partition("=")[0]
    if lines[above - 1].rstrip().endswith("\\"):
        words = f"an empty line stands after the backslash, before {name}: the command ends there, and {CUT}"
    else:
        words = f"{name} begins a line of its own, the line before has no backslash at its end: {CUT}"
    shell.damage.append(Evidence("command", words, line))


def _line_above(lines: list[str], line: int) -> int:
    """The number of the last line before ``line`` that holds more than blanks or a comment."""
    above = line - 1
    while above > 1 and (not lines[above - 1].strip() or lines[above - 1].lstrip().startswith("#")):
        above -= 1
    return above


# ---------------------------------------------------------------------------------------------- damage put right


def _put_right(found: Found, text: str) -> None:
    """Sets ``found.whole`` to what the text would launch with its lines joined again, and reports every break."""
    lines = text.split("\n")
    reported: dict[int, Evidence] = {}
    whole: Found | None = None
    for _ in range(_MOST_BREAKS if len(text) <= _LONGEST_REPAIR else 0):
        shell = Shell("\n".join(lines))
        whole = _posix(shell)
        for item in shell.damage:
            reported.setdefault(item.line or 0, item)
        if not shell.breaks:
            break
        for line, kind in shell.breaks.items():
            _join(lines, line, kind)
    else:
        return  # too long, or broken in too many places
    if whole is None or not whole.command:
        return
    found.whole = whole
    whole.damage = []
    said = {item.line for item in found.damage}
    found.damage += [item for line, item in sorted(reported.items()) if line not in said]
    found.damage.sort(key=lambda item: item.line or 0)


def _join(lines: list[str], line: int, kind: str) -> None:
    """Makes the lines around a break one command; their numbers stay."""
    if kind == "trailing":
        lines[line - 1] = re.sub(r"\\[ \t]+(?:#.*)?$", "\\\\", lines[line - 1])
        return
    first = _line_above(lines, line) if kind == "orphan" else line
    for number in range(first, line if kind == "orphan" else line + 1):
        kept = re.sub(r"(?:^|\s)#.*$", "", lines[number - 1]).rstrip().removesuffix("\\").rstrip()
        lines[number - 1] = f"{kept} \\" if kept else "\\"


def _from_launch_line(text: str) -> Found | None:
    """The launch again, read from the line that names it: what stands above may be prose with stray quotes."""
    lines = text.split("\n")
    tried = 0
    for number, line in enumerate(lines):
        if not _LAUNCH_LINE.search(line) or line.lstrip().startswith("#"):
            continue
        tried += 1
        if tried > 4:
            return None
        first = number
        while first and lines[first - 1].rstrip().endswith("\\"):
            first -= 1
        above = [earlier for earlier in lines[:first] if _SETTING_LINE.match(earlier) and len(earlier) < 4000]
        start = _LAUNCH_LINE.search(line)
        for piece in (lines[first:], [line[start.start() :] if start else "", *lines[number + 1 :]]):
            shell = Shell("\n".join([*above[-50:], *piece]))
            found = _posix(shell)
            if found is not None:
                return found
    return None


def _in_variables(shell: Shell) -> Found | None:
    """``CMD="vllm serve ..."`` that the text never runs."""
    for words in shell.variables.arrays.values():
        found = find(Simple(1, words), shell.variables) if words else None
        if found is not None:
            return found
    for value in shell.variables.values.values():
        if MENTION.search(value):
            found = find_in_text(value, shell.variables, shell.variables.environment(), 1)
            if found is not None:
                return found
    return None


def _lone_flags(text: str) -> Found | None:
    """Flags without a program, or behind a program of another name."""
    shell = Shell(text)
    words: list[str] = []
    best: Found | None = None
    score = 1
    for command in shell.commands():
        count = known_flags_in(_arguments(command.words))
        if command.words[0].startswith("-"):
            words.extend(_arguments(command.words))
        elif count > score and (start := _first_flag(command.words)) is not None:
            score = count
            environment = {**shell.variables.environment(), **command.assigned}
            best = Found(kind="other", words=_arguments(command.words[start:]), env=environment)
    if best is None and known_flags_in(words) >= 1:
        best = Found(kind="other", words=words, env=shell.variables.environment())
    if best is not None:
        best.damage.extend(shell.damage)
    return best


def _first_flag(words: list[str]) -> int | None:
    return next((index for index, word in enumerate(words) if word.startswith("--")), None)


def _arguments(words: list[str]) -> list[str]:
    """The words, or those in ``--args=--a=1,--b=2`` if one is such a list."""
    for index, word in enumerate(words):
        for name in ("--args", "--container-args"):
            if word.startswith(name + "="):
                return _split_list(word[len(name) + 1 :])
            if word == name and index + 1 < len(words) and "," in words[index + 1]:
                return _split_list(words[index + 1])
    return words


def _split_list(text: str) -> list[str]:
    """``--a=1,--b={"x":1,"y":2},c`` -> words; ``^|^--a|--b`` names its own separator."""
    own = re.match(r"\^(.{1,3})\^", text)
    if own:
        return text[own.end() :].split(own.group(1))
    words: list[str] = []
    for piece in re.split(r",(?=-)", text):
        if "=" in piece or not piece.startswith("-"):
            words.append(piece)
        else:
            words.extend(piece.split(",", 1))
    return [word for word in words if word]


def _uncommented(text: str) -> Found | None:
    """``# vllm serve ...``: a root prompt, or a command put out of use; better than nothing."""
    if not _COMMENTED.search(text) or not _LAUNCH_LINE.search(text):
        return None
    return _posix(Shell(without_prompts(_COMMENTED.sub(r"\1", text))))


def _listed_words(text: str) -> Found | None:
    """``["vllm", "serve", ...]``, ``CMD ["--model", ...]``."""
    for match in list(re.finditer(r"\[\s*\"[^\]\[]*\]", text))[:50]:
        try:
            words = json.loads(re.sub(r",\s*\]$", "]", match.group()))
        except (ValueError, RecursionError):
            continue
        if words and all(isinstance(word, str) for word in words):
            found = find(Simple(1, words), Variables())
            if found is None and known_flags_in(words) >= 2:
                found = Found(kind="other", words=words)
            if found is not None:
                return found
    return None


def _broken(shell: Shell, text: str) -> Found | None:
    """A container command that ends before its image: the shell would have passed nothing on to an engine."""
    if shell.damage and re.search(r"\b(?:docker|podman|nerdctl)\s+run\b", text) and "vllm" in text:
        return Found(kind="docker-run", damage=list(shell.damage))
    return None
