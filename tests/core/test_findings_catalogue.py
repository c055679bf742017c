"""The catalogue of findings is complete and its pages are up to date."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadmaster.core.checks.catalogue import codes, finding
from loadmaster.core.tables import load_toml

ROOT = Path(__file__).resolve().parent.parent.parent
ENTRIES = load_toml("findings.toml")


@pytest.mark.parametrize("code", ENTRIES)
def test_every_code_is_told_in_full(code: str) -> None:
    entry = ENTRIES[code]
    assert set(entry) == {"title", "severity", "stage", "what", "why", "example", "remedy", "source"}
    assert entry["severity"] in ("error", "warning", "note")
    for field in ("title", "what", "why", "example", "remedy", "source"):
        assert entry[field].strip(), field
    assert not entry["title"].endswith(".")
    for field in ("what", "why"):
        assert entry[field].endswith("."), field


def test_codes_keep_their_order_and_number() -> None:
    assert len(codes()) == 103
    stages = [ENTRIES[code]["stage"] for code in codes()]
    assert all(0 <= stage <= 12 for stage in stages)


def test_a_finding_takes_title_and_severity_from_the_catalogue() -> None:
    item = finding("port-in-use", "cause")
    assert (item.title, item.severity) == (ENTRIES["port-in-use"]["title"], "error")
    with pytest.raises(KeyError):
        finding("no-such-code", "cause")


def test_pages_are_up_to_date() -> None:
    script = ROOT / "scripts" / "docs_failures.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, "run scripts/docs_failures.py\n" + result.stdout
