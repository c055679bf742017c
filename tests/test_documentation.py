"""Pages that are generated are up to date, and what the pages name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.cli import TABLE

ROOT = Path(__file__).resolve().parent.parent


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
