#!/usr/bin/env python3
"""Write docs/failures, a page a code: texts from core/data/findings.toml and failure-pages.toml, what a log says by
version from the own logs of tests/data/logs and the signatures, the Chinese pages from findings.zh-CN.toml.

--check only compares.
"""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from loadmaster.core.diagnosis import Diagnoser  # noqa: E402
from loadmaster.core.signatures import FAMILIES, Signature, family  # noqa: E402

DATA = ROOT / "src" / "loadmaster" / "core" / "data"
LOGS = ROOT / "tests" / "data" / "logs"
FOLDER = ROOT / "docs" / "failures"
CHINESE = FOLDER / "zh-CN"
STAGES = {
    0: "The command",
    1: "The files",
    2: "Hub and architecture",
    3: "Quantisation",
    4: "Parallelism and context",
    5: "The machine",
    6: "Memory: weights",
    7: "Memory: profile",
    8: "Memory: what is left",
    9: "Memory: cache and graphs",
    10: "Pictures and requests",
    11: "While it runs",
    12: "Symptoms",
}
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy", "llamacpp": "llama.cpp"}
_LOG_NAME = re.compile(r"(?P<code>.+)-(?P<engine>vllm|sglang|lmdeploy|llamacpp)-(?P<version>[\d.]+)")
_PREFIX = re.compile(
    r"^(?:\([^)]*pid=\d+\) )*(?:(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \S+\] |\[\d{4}-[^\]]*\] )?"
)
_LONGEST_LINE = 180
_MOST_LINES = 2


def table(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads((DATA / name).read_text(encoding="utf-8"))


@cache
def signatures() -> dict[str, list[Signature]]:
    found: dict[str, list[Signature]] = {}
    for name in FAMILIES:
        for entry in family(name).signature:
            found.setdefault(entry.code, []).append(entry)
    return found


@cache
def seen_lines() -> dict[str, dict[str, list[str]]]:
    """By code and line of a log, as the diagnosis quotes it: the engines and versions whose own logs have it."""
    found: dict[str, dict[str, list[str]]] = {}
    spoken: dict[tuple[str, str], str] = {}
    for path in sorted(LOGS.glob("*.log"), key=_by_version):
        name = _LOG_NAME.fullmatch(path.stem)
        if name is None or name["code"] == "healthy":
            continue
        diagnoser = Diagnoser()
        diagnoser.read(path.read_bytes())
        lines = [_shortened(item.text or "") for item in diagnoser.close().findings[0].evidence]
        text = "\n".join(dict.fromkeys(lines[:_MOST_LINES]))
        same = spoken.setdefault((name["code"], re.sub(r"\d+", "N", text)), text)
        found.setdefault(name["code"], {}).setdefault(same, []).append(f"{ENGINES[name['engine']]} {name['version']}")
    return found


def _shortened(line: str) -> str:
    """Without what a logger puts before it, and cut at the end of a sentence where it is long."""
    text = " ".join(_PREFIX.sub("", line).split())
    if len(text) <= _LONGEST_LINE:
        return text
    end = max(text.rfind(". ", 0, _LONGEST_LINE), text.rfind(", ", 0, _LONGEST_LINE), _LONGEST_LINE // 2)
    return text[: end + 1] + " ..."


def _by_version(path: Path) -> tuple[str, str, list[int]]:
    name = _LOG_NAME.fullmatch(path.stem)
    if name is None:
        return (path.stem, "", [])
    engine = list(ENGINES).index(name["engine"])
    return (name["code"], str(engine), [int(part) for part in name["version"].split(".")])


def log_block(code: str, none: str) -> str:
    lines = [f"{', '.join(where)}:\n\n```\n{text}\n```" for text, where in seen_lines().get(code, {}).items()]
    return "\n\n".join(lines) if lines else none


def sources(code: str, entry: dict[str, Any]) -> str:
    """Where the knowledge is from: the catalogue's source, then each wording's file with the versions compared."""
    rows = [entry["source"]]
    for item in signatures().get(code, []):
        engines = ", ".join(ENGINES[name] for name in item.engines)
        versions = f" {item.versions}" if item.versions and engines else ""
        row = f"{engines}{versions}: {item.source}" if engines else item.source
        if row not in rows:
            rows.append(row)
    return "\n".join(f"- {row}" for row in rows)


def page(code: str, entry: dict[str, Any], more: dict[str, Any], chinese: bool) -> str:
    """One finding: what it is, why it matters, how to fix it, what the log says, where the knowledge comes from."""
    steps = more.get("steps", [entry["remedy"]])
    blocks = [
        f"# {code}",
        f"**{entry['title']}** ({entry['severity']})" + (f" · [简体中文](zh-CN/{code}.md)" if chinese else ""),
        "## What it means\n\n" + entry["what"],
        "## Why it matters\n\n" + entry["why"],
        "## How to fix it\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1)),
        "## Example\n\n```\n" + entry["example"].strip("\n") + "\n```",
        "## In the log\n\n"
        + log_block(code, "No line of a log names this: it is found before a launch, or by figures."),
    ]
    if "apart" in more:
        blocks.append("## How it is told apart\n\n" + more["apart"])
    blocks += ["## Sources\n\n" + sources(code, entry), "[All findings](index.md)"]
    return "\n\n".join(blocks) + "\n"


def chinese_page(code: str, entry: dict[str, Any], severity: str) -> str:
    word = {"error": "错误", "warning": "警告", "note": "提示"}[severity]
    blocks = [
        f"# {code}",
        f"**{entry['title']}**（{word}） · [English](../{code}.md)",
        "## 是什么\n\n" + entry["what"],
        "## 为什么\n\n" + entry["why"],
        "## 怎么解决\n\n" + "\n".join(f"{number}. {step}" for number, step in enumerate(entry["steps"], 1)),
        "## 日志里的样子\n\n" + log_block(code, "日志里没有对应的行。"),
        "## 怎样与相似的问题区分\n\n" + entry["apart"],
        "[全部中文页面](index.md) · [All findings](../index.md)",
    ]
    return "\n\n".join(blocks) + "\n"


def chinese_index(entries: dict[str, dict[str, Any]]) -> str:
    rows = [f"| [`{code}`]({code}.md) | {entry['title']} |" for code, entry in entries.items()]
    blocks = [
        "# 常见故障",
        f"`loadmaster diagnose` 能指出的原因中最常见的 {len(entries)} 个。其余的见[英文索引](../index.md)。",
        "由 `scripts/docs_failures.py` 根据 `src/loadmaster/core/data/findings.zh-CN.toml` 生成。",
        "\n".join(["| 代码 | 原因 |", "|---|---|", *rows]),
    ]
    return "\n\n".join(blocks) + "\n"


def index(entries: dict[str, dict[str, Any]]) -> str:
    """All codes, by the stage of a start at which the cause lies."""
    blocks = [
        "# Findings",
        f"{len(entries)} causes that `check`, `plan`, `inspect` and `diagnose` can name. A code names a cause, not a "
        "message: several messages may lead to one code, and one message to several. The severity is the usual one; a "
        "finding may be milder where it is less sure or does less harm. The most frequent ones in "
        "[简体中文](zh-CN/index.md).",
        "Generated by `scripts/docs_failures.py` from `src/loadmaster/core/data`: findings.toml, failure-pages.toml, "
        "signatures; and from tests/data/logs.",
    ]
    for stage, name in STAGES.items():
        rows = [(code, entry) for code, entry in entries.items() if entry["stage"] == stage]
        if rows:
            lines = [f"| [`{code}`]({code}.md) | {entry['severity']} | {entry['title']} |" for code, entry in rows]
            blocks.append("\n".join([f"## {name}", "", "| code | severity | what |", "|---|---|---|", *lines]))
    return "\n\n".join(blocks) + "\n"


def pages() -> dict[Path, str]:
    entries, more, chinese = table("findings.toml"), table("failure-pages.toml"), table("findings.zh-CN.toml")
    found = {
        FOLDER / f"{code}.md": page(code, entry, more.get(code, {}), code in chinese) for code, entry in entries.items()
    }
    found[FOLDER / "index.md"] = index(entries)
    for code, entry in chinese.items():
        found[CHINESE / f"{code}.md"] = chinese_page(code, entry, entries[code]["severity"])
    found[CHINESE / "index.md"] = chinese_index(chinese)
    return found


def main() -> int:
    wanted = pages()
    there = set(FOLDER.rglob("*.md"))
    if "--check" in sys.argv[1:]:
        stale = sorted(path.name for path in there - set(wanted))
        for path, text in wanted.items():
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path.relative_to(FOLDER)))
        if stale:
            print("not up to date: " + ", ".join(stale))
        return 1 if stale else 0
    CHINESE.mkdir(parents=True, exist_ok=True)
    for path in there - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
