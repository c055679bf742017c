"""Pages that are generated are up to date, and what the pages name exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from loadmaster.cli import TABLE

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "src" / "loadmaster" / "core" / "data"


def run_script(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), "--check"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("script", ["docs_commands.py", "docs_load_sheet.py", "docs_failures.py", "accuracy.py"])
def test_generated_pages_are_up_to_date(script: str) -> None:
    result = run_script(script)
    assert result.returncode == 0, f"run scripts/{script}\n{result.stdout}{result.stderr}"


def pages() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in pages():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_every_command_has_its_section() -> None:
    page = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    assert [name for name in TABLE if f"## loadmaster {name}\n" not in page] == []


def test_every_finding_that_a_log_can_show_has_its_lines_its_steps_and_its_lookalikes() -> None:
    more = tomllib.loads((DATA / "failure-pages.toml").read_text(encoding="utf-8"))
    assert set(more) <= set(tomllib.loads((DATA / "findings.toml").read_text(encoding="utf-8")))
    thin = []
    for page in sorted((ROOT / "docs" / "failures").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        logged = any((ROOT / "tests" / "data" / "logs").glob(f"{page.stem}-*.log"))
        wanted = [
            "## What it means",
            "## Why it matters",
            "## How to fix it",
            "## Example",
            "## In the log",
            "## Sources",
        ]
        if page.stem != "index" and not all(heading in text for heading in wanted):
            thin.append(f"{page.stem}: headings")
        if logged and "No line of a log names this" in text:
            thin.append(f"{page.stem}: no line")
    assert thin == []


def test_chinese_pages_are_complete_and_keep_codes_flags_and_numbers() -> None:
    texts = tomllib.loads((DATA / "findings.zh-CN.toml").read_text(encoding="utf-8"))
    catalogue = tomllib.loads((DATA / "findings.toml").read_text(encoding="utf-8"))
    flags = flag_names()
    assert len(texts) >= 20
    assert set(texts) <= set(catalogue)
    for code, entry in texts.items():
        assert set(entry) == {"title", "what", "why", "steps", "apart"}, code
        whole = "\n".join([entry["title"], entry["what"], entry["why"], *entry["steps"], entry["apart"]])
        assert not re.search(r"[\u4e00-\u9fff][,;:!?](?:\s|$)", whole), (
            f"{code}: ASCII punctuation after a Chinese sign"
        )
        assert "！" not in whole, code
        for sentence in (entry["what"], entry["why"], entry["apart"], *entry["steps"]):
            assert sentence.endswith("。"), (code, sentence)
        named = set(re.findall(r"`(--[a-z][a-z-]+)", whole)) - {"--ipc", "--shm-size", "--recommend", "--gpus"}
        assert named <= flags, (code, named - flags)


def flag_names() -> set[str]:
    """All flags of all vLLM releases that the tables know."""
    return set(re.findall(r"--[a-z][a-z0-9-]+", (DATA / "vllm-flags.json").read_text(encoding="utf-8")))
