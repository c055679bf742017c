"""The flags by themselves: known or not, values, units, and pairs of flags that contradict each other."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

from loadmaster.core.argv import parse_argv
from loadmaster.core.checks.case import LaunchCase, is_placeholder
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.checks.spelling import in_newest, nearest, release_words
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Evidence, Finding, Fix
from loadmaster.core.flagtable import Flag, flag_history, flag_table, releases_looked_at
from loadmaster.core.tables import load_toml

_PIECE = re.compile(r"\w+:[\w.]+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_UNIT = re.compile(r"^(\d+)([kmg])$", re.IGNORECASE)
_THOUSAND = {"k": 1000, "m": 1000**2, "g": 1000**3}
_BINARY = {"K": 1024, "M": 1024**2, "G": 1024**3}
_TOKEN_FLAGS = ("--max-model-len", "--max-num-batched-tokens")
_BLOCK = 16  # tokens of a cache block of most models
# --limit-mm-per-prompt image=4: refused since the reader of name=value pairs was taken out
_PAIRS_REMOVED = "0.10.0"
_OBJECTS = ("--hf-overrides", "--speculative-config")
_OLDEST_PLANNED = "0.17"  # the first version whose rules loadmaster has


def check_flags(case: LaunchCase) -> Iterator[Finding]:
    """Everything that the flags alone decide."""
    yield from _unknown(case)
    yield from _leaving(case)
    yield from _values(case)
    yield from _pairs(case)
    yield from _units(case)
    yield from _conflicts(case)


# ------------------------------------------------------------------------------------------ unknown flags


def _unknown(case: LaunchCase) -> Iterator[Finding]:
    hints = load_toml("flag-hints.toml")["flags"]
    for flag in dict.fromkeys(case.launch.unknown_flags):
        name = flag.split("=", 1)[0].replace("_", "-")
        hint = hints.get(name, {})
        runs = flag_history(name)
        near = None if hint else nearest(name, case.version)
        near = None if near == name else near
        said = []
        if case.version is None:
            said.append(f"no vLLM release has {name}")
        else:
            newest = f"the newest vLLM that was read, {releases_looked_at()[-1]},"
            said.append(f"{newest if case.ahead else f'vLLM {case.version}'} has no {name}")
            if runs:
                said.append(f"vLLM has it {release_words(runs)}")
        if hint:
            said.append(hint["says"])
        if near:
            said.append(f"did you mean {near}")
        cause = "; ".join(said) + ("?" if near else "")
        yield finding(
            "unknown-flag",
            cause if cause.startswith("vLLM") else cause[0].upper() + cause[1:],
            evidence=[Evidence("command", _as_written(case, flag))],
            fixes=_unknown_fixes(case, flag, hint, near, runs),
            severity="warning" if case.ahead else None,
            confidence="possible" if case.ahead else "certain",
        )


def _as_written(case: LaunchCase, flag: str) -> str:
    value = _carried(case, flag)
    return flag if value is None else f"{flag} {value}"


def _carried(case: LaunchCase, flag: str) -> str | None:
    """The value that follows an unknown flag in the text, if one does."""
    if "=" in flag:
        return flag.split("=", 1)[1]
    for tokens in (case.launch.raw, case.launch.extra):
        for number, token in enumerate(tokens):
            if token == flag and number + 1 < len(tokens) and not tokens[number + 1].startswith("-"):
                return tokens[number + 1]
            if token.startswith(flag + "="):
                return token.split("=", 1)[1]
    return None


def _unknown_fixes(
    case: LaunchCase, flag: str, hint: dict[str, Any], near: str | None, runs: tuple[tuple[str, str], ...]
) -> list[Fix]:
    use = hint.get("use") or near
    argv = _successor(case, flag, hint, use) if use else None
    if argv is not None:
        words = "The switch that vLLM has." if hint.get("switch") else f"{use} is what {case.version_words} calls it."
        return [Fix(words, argv, (flag,))]
    fixes = [Fix("Without it the engine starts." if not use else f"See {use}.", remove=(flag,))]
    later = [first for first, _ in runs if case.version is not None and case.since(first) is False]
    if later:
        fixes.append(Fix(f"Or an engine that has it: vLLM {later[0]} or newer."))
    return fixes


def _successor(case: LaunchCase, flag: str, hint: dict[str, Any], use: str) -> tuple[str, ...] | None:
    """The flag to write instead, with the value in its form; None when this version would not take it so."""
    if use in _OBJECTS and "key" not in hint:
        return None  # the value is one part of many in there
    value = hint.get("value") if hint.get("switch") else _carried(case, flag)
    if value is not None and "key" in hint:
        value = json.dumps({hint["key"]: value})
    if value is not None and is_placeholder(value):
        return (use, value)
    argv = (use,) if value is None else (use, value)
    launch = parse_argv(["vllm", "serve", "m", *argv], engine_version=case.version)
    if use != "--model" and (launch.unknown_flags or launch.refused or use not in launch.flags):
        return None
    share = launch.flags.get("--gpu-memory-utilization", 1)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        return None
    wrong = next(iter(_values(LaunchCase(launch, None, None, case.engine, None))), None)
    return argv if wrong is None else None


def _leaving(case: LaunchCase) -> Iterator[Finding]:
    """Flags that the newest release has not: those that no release planned here has, and those on their way out."""
    hints = load_toml("flag-hints.toml")["flags"]
    dead: list[Evidence] = []
    gone: list[Evidence] = []
    fixes: dict[bool, list[Fix]] = {True: [], False: []}
    for flag in case.launch.flags:
        runs = flag_history(flag)
        if not runs or in_newest(runs) or flag in case.launch.unknown_flags:
            continue
        hint = hints.get(flag, {})
        last = runs[-1][1]
        words = f"{case.shown(flag)}: last in vLLM {last}" + (f"; {hint['says']}" if "says" in hint else "")
        is_dead = case.version is None and not at_least(last, _OLDEST_PLANNED)
        (dead if is_dead else gone).append(Evidence("command", words))
        fixes[is_dead] += _unknown_fixes(case, flag, hint, None, runs)
    if dead:
        yield finding(
            "unknown-flag",
            f"The version is not known; every release from {_OLDEST_PLANNED} on ends at once with an unknown flag.",
            evidence=dead,
            fixes=fixes[True],
            severity="warning",
            confidence="likely",
        )
    if gone:
        known = case.version is not None
        yield finding(
            "flag-deprecated",
            "Newer releases refuse what this command says."
            if known
            else "The version is not known; releases after those named refuse the command.",
            evidence=gone,
            fixes=[] if known else fixes[False],
            severity=None if known else "warning",
            confidence="certain" if known else "possible",
        )


# ------------------------------------------------------------------------------------------ values


def _values(case: LaunchCase) -> Iterator[Finding]:
    ranges = load_toml("flag-hints.toml")["ranges"]
    table = flag_table(case.version).flags
    told = {"--limit-mm-per-prompt"} if _old_pairs(case.written("--limit-mm-per-prompt") or "") else set()
    for flag, value in case.launch.flags.items():
        state = table.get(flag)
        if state is None or (isinstance(value, str) and is_placeholder(value)):
            continue
        problem = _wrong_kind(case, flag, value, state) or _out_of_range(value, ranges.get(flag))
        by_table = problem is None
        if problem is None and flag != "--quantization":
            problem = _not_a_choice(case, value, state)
        if problem is None:
            continue
        told.add(flag)
        yield finding(
            "flag-value-invalid",
            f"{flag} {problem}",
            evidence=[Evidence("command", case.shown(flag))],
            fixes=_value_fixes(case, flag, value, state, ranges.get(flag)),
            severity="warning" if by_table and case.ahead else None,
            confidence="likely" if case.ahead else "certain",
        )
    for item in case.launch.refused:
        flag = item.text.split()[0] if item.text.strip() else ""
        if flag in told or is_placeholder(item.text):
            continue
        if flag == "--quantization" and case.has(flag):
            continue  # an unknown method is another finding
        yield finding(
            "flag-value-invalid",
            f"{'The newest vLLM that was read' if case.ahead else case.version_words} refuses this: {item.text}",
            evidence=[item],
            severity="warning" if case.ahead else None,
            fixes=_value_fixes(case, flag, case.value(flag), table[flag], None) if flag in table else [],
            confidence="possible" if case.ahead else "certain" if case.version is not None else "likely",
        )


def _wrong_kind(case: LaunchCase, flag: str, value: Any, state: Flag) -> str | None:
    kind = state.kind
    if kind in ("int", "float", "human", "human-auto"):
        if isinstance(value, str):
            return f"takes a {'whole ' if kind == 'int' else ''}number, not {value!r}"
        if kind == "human" and flag == "--max-model-len" and value == -1 and case.version is not None:
            return f"-1 (auto) is not known to vLLM {case.version} yet, only from 0.14.0 on"
        if kind == "int" and isinstance(value, float) and not value.is_integer():
            return f"takes a whole number, not {value}"
    must_be_object = kind == "json" or (flag == "--limit-mm-per-prompt" and kind == "json-or-str")
    if must_be_object and isinstance(value, str) and not _old_pairs(value):
        return "takes a JSON object, and this is none: " + (value if len(value) < 80 else value[:77] + "...")
    return None


def _old_pairs(text: str) -> bool:
    return re.fullmatch(r"\w+=\w+(,\s*\w+=\w+)*", text) is not None


def _out_of_range(value: Any, bounds: dict[str, Any] | None) -> str | None:
    if bounds is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if value in bounds.get("also", ()):
        return None
    least, most = bounds.get("least"), bounds.get("most")
    if least is not None and value < least:
        return f"must be at least {least}" + (f"; {bounds['says']}" if "says" in bounds else "")
    if most is not None and value > most:
        return f"must be at most {most}"
    return None


def _not_a_choice(case: LaunchCase, value: Any, state: Flag) -> str | None:
    """Of an unknown version the table has what any release takes."""
    if not state.choices or isinstance(value, (dict, list, bool)):
        return None
    if str(value) in [str(choice) for choice in state.choices]:
        return None
    shown = ", ".join(str(choice) for choice in state.choices[:12]) + (", ..." if len(state.choices) > 12 else "")
    who = f"vLLM {case.version}" if case.version else "no release"
    return f"is {value}, which {who} {'does not take' if case.version else 'takes'}: {shown}"


def _value_fixes(case: LaunchCase, flag: str, value: Any, state: Flag, bounds: dict[str, Any] | None) -> list[Fix]:
    if isinstance(value, str) and "\\" in value and "{" in value:
        plain = value.replace("\\", "")
        return [Fix("Inside single quotes a backslash stays a backslash: leave it out.", (flag, plain))]
    if isinstance(value, str) and state.kind in ("json", "json-or-str", "pairs"):
        whole = quotes_restored(_with_pieces(case, flag, value))
        if whole is not None:
            return [Fix("The shell took the quotes off: single quotes around the object keep them.", (flag, whole))]
    if _out_of_range(value, bounds) is not None:
        return [Fix("Without it the engine takes its default.", remove=(flag,))]
    if state.choices and not isinstance(value, dict | list | bool):
        near = difflib.get_close_matches(str(value).lower(), [str(choice) for choice in state.choices], 1)
        if near:
            return [Fix("The nearest that is taken.", (flag, near[0]))]
    return []


def _with_pieces(case: LaunchCase, flag: str, value: str) -> str:
    """The value with the words that a shell made of ``{"a":1,"b":2}`` without quotes: ``a:1 b:2``."""
    if not _PIECE.fullmatch(value):
        return value
    tokens = list(case.launch.raw)
    start = tokens.index(value) if value in tokens else len(tokens)
    pieces = []
    for token in tokens[start:]:
        if not _PIECE.fullmatch(token):
            break
        pieces.append(token)
    return "{" + ",".join(pieces) + "}"


def quotes_restored(text: str) -> str | None:
    """``{image:2,mode:fast}`` as JSON; None if more than quotes is missing."""
    if not text.startswith("{"):
        return None

    def quoted(match: re.Match[str]) -> str:
        word = match.group()
        return word if word in ("true", "false", "null") or _NUMBER.fullmatch(word) else json.dumps(word)

    try:
        whole = json.loads(re.sub(r"[^\s{}\[\]:,\"]+", quoted, text))
    except (ValueError, RecursionError):
        return None
    return json.dumps(whole) if isinstance(whole, dict) and whole else None


def _pairs(case: LaunchCase) -> Iterator[Finding]:
    """``--limit-mm-per-prompt image=4``, which newer releases do not read."""
    written = case.written("--limit-mm-per-prompt")
    if written is None or not _old_pairs(written) or case.since(_PAIRS_REMOVED) is False:
        return
    import json

    new = json.dumps(
        {name: int(n) if n.isdigit() else n for name, n in (p.strip().split("=") for p in written.split(","))}
    )
    yield finding(
        "flag-value-invalid",
        "--limit-mm-per-prompt takes JSON; the form name=value was read up to 0.9.2 and is refused from "
        f"{_PAIRS_REMOVED} on.",
        evidence=[Evidence("command", f"--limit-mm-per-prompt {written}")],
        fixes=[Fix("The same limits as JSON.", ("--limit-mm-per-prompt", new))],
        severity="error" if case.version else "warning",
        confidence="certain" if case.version else "likely",
    )


# ------------------------------------------------------------------------------------------ 4k and 4K


def _units(case: LaunchCase) -> Iterator[Finding]:
    for flag in _TOKEN_FLAGS:
        written = case.written(flag) or ""
        match = _UNIT.fullmatch(written)
        if match is None or not case.has(flag):
            continue
        number, unit = int(match[1]), match[2]
        thousand, binary = number * _THOUSAND[unit.lower()], number * _BINARY[unit.upper()]
        positions = case.model.text.max_position_embeddings if case.model else None
        if unit.islower() and (_round_in_binary(number) or binary == positions):
            why = f"{written} is {thousand:,}; {number}{unit.upper()} would be {binary:,}"
            too_long = flag == "--max-model-len" and positions is not None and positions < binary
            better = min(thousand, positions) if too_long and positions is not None else binary
        elif unit.isupper() and flag == "--max-model-len" and positions is not None and thousand <= positions < binary:
            why = f"{written} is {binary:,}, above the model's {positions:,} positions"
            why += f"; {number}{unit.lower()} would be {thousand:,}"
            better = thousand
        else:
            continue
        if thousand % _BLOCK:
            why += f"; {thousand:,} is no multiple of the cache's block of {_BLOCK} tokens"
        yield finding(
            "unit-4k-vs-4K",
            why + ".",
            evidence=[Evidence("command", f"{flag} {written}")],
            fixes=[Fix("Say the number that is meant.", (flag, str(better)))],
            confidence="likely",
        )


def _round_in_binary(number: int) -> bool:
    """Whether the number before the unit is one that sizes in 1024s have: 2, 4, 8, 12, 16, 20, 24, 32, 40, 64, 128."""
    return number in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96) or (
        number >= 128 and number & (number - 1) == 0
    )


# ------------------------------------------------------------------------------------------ contradictions


def _conflicts(case: LaunchCase) -> Iterator[Finding]:
    yield from _prefill(case)
    yield from _sequences(case)
    yield from _tools(case)
    yield from _lora(case)


def _prefill(case: LaunchCase) -> Iterator[Finding]:
    tokens, length = case.integer("--max-num-batched-tokens"), case.integer("--max-model-len")
    chunked = case.switch("--enable-chunked-prefill")
    if tokens is None or length is None or tokens >= length:
        return
    if chunked is False:
        reason = "chunked prefill is off"
    elif chunked is None and case.since("0.8.0") is False and length <= 32768:
        reason = f"vLLM {case.version} has chunked prefill off up to 32,768 tokens of context"
    else:
        return
    yield finding(
        "flag-conflict",
        f"A prompt of {length:,} tokens must pass in one step because {reason}, and a step has room for {tokens:,}.",
        evidence=case.evidence("--max-num-batched-tokens", "--max-model-len", "--enable-chunked-prefill"),
        fixes=[
            Fix("Let long prompts pass in parts.", ("--enable-chunked-prefill",), ("--no-enable-chunked-prefill",)),
            Fix("Or a step as long as the context.", ("--max-num-batched-tokens", str(length))),
        ],
    )


def _sequences(case: LaunchCase) -> Iterator[Finding]:
    tokens, seqs = case.integer("--max-num-batched-tokens"), case.integer("--max-num-seqs")
    if tokens is None or seqs is None or tokens < 1 or seqs <= tokens:
        return
    yield finding(
        "flag-conflict",
        f"Each of {seqs:,} sequences takes a token in a step, and a step has room for {tokens:,}.",
        evidence=case.evidence("--max-num-batched-tokens", "--max-num-seqs"),
        fixes=[Fix("As many sequences as fit in a step.", ("--max-num-seqs", str(tokens)))],
    )


def _tools(case: LaunchCase) -> Iterator[Finding]:
    automatic, parser = case.switch("--enable-auto-tool-choice"), case.has("--tool-call-parser")
    if automatic and not parser:
        yield finding(
            "flag-conflict",
            "--enable-auto-tool-choice needs to be told how the model writes its calls.",
            evidence=case.evidence("--enable-auto-tool-choice"),
            fixes=[
                Fix(
                    "The parser of the model's family: hermes for most Qwen, qwen3_coder, llama3_json, mistral, glm45.",
                    ("--tool-call-parser", "hermes"),
                )
            ],
        )
    elif parser and not automatic:
        yield finding(
            "flag-conflict",
            "The tool parser is not used for tool_choice auto unless --enable-auto-tool-choice is given: such requests "
            "are refused.",
            evidence=case.evidence("--tool-call-parser"),
            fixes=[Fix("If the clients use tools.", ("--enable-auto-tool-choice",))],
            severity="note",
            confidence="likely",
        )


def _lora(case: LaunchCase) -> Iterator[Finding]:
    if case.has("--lora-modules") and not case.switch("--enable-lora"):
        yield finding(
            "flag-conflict",
            "--lora-modules names adapters, and adapters are off.",
            evidence=case.evidence("--lora-modules"),
            fixes=[Fix("Switch adapters on.", ("--enable-lora",))],
            severity="warning",
            confidence="likely",
        )
