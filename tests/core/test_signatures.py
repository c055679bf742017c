"""What is known of failures: each own log shows its cause first and no other; each wording belongs to a known code.

The logs of tests/data/logs are written from the message formats of the engines' sources, CODE-ENGINE-VERSION.log.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from loadmaster.core.checks.catalogue import codes
from loadmaster.core.diagnosis import Diagnoser, Diagnosis
from loadmaster.core.signatures import FAMILIES, Signature, family

FOLDER = Path(__file__).resolve().parent.parent / "data" / "logs"
LOGS = sorted(FOLDER.glob("*.log"))
NAME = re.compile(r"(?P<code>.+)-(?P<engine>vllm|sglang|lmdeploy|llamacpp)-(?P<version>[\d.]+)")
FRAGMENTS = tomllib.loads((FOLDER.parent / "log-fragments.toml").read_text(encoding="utf-8"))["fragment"]
ENTRIES = [entry for name in FAMILIES for entry in family(name).signature]

# Causes of a launch that only a command, a directory or a machine shows, never a log.
WITHOUT_LOG = {
    "command-damaged",
    "download-incomplete",
    "dtype-downcast",
    "flag-deprecated",
    "gpus-unequal",
    "hash-unknown",
    "one-gpu-idle",
    "profile-below-images",
    "slow-image-preprocessing",
    "tensor-duplicate",
    "trust-remote-code-unneeded",
    "unit-4k-vs-4K",
    "weights-unknown",
}
# What stands rightly beside a cause: the failure that held memory led to.
BESIDE = {
    "gpu-held-by-other-process": {"free-memory-below-request"},
    "weights-name-mismatch": {"speculative-weights-missing"},
}
# Codes that only stand beside a cause: what to do about it.
ONLY_BESIDE = {"speculative-weights-missing"}


def diagnosed(text: bytes) -> Diagnosis:
    diagnoser = Diagnoser()
    diagnoser.read(text)
    return diagnoser.close()


def parts(path: Path) -> tuple[str, str, str]:
    found = NAME.fullmatch(path.stem)
    assert found is not None, path.name
    return found["code"], found["engine"], found["version"]


FAILED = [path for path in LOGS if not path.name.startswith("healthy-")]
HEALTHY = [path for path in LOGS if path.name.startswith("healthy-")]
REMARKS = {path.name for path in FAILED if "Application startup complete" in path.read_text(encoding="utf-8")}


@pytest.mark.parametrize("path", FAILED, ids=lambda path: path.stem)
def test_an_own_log_shows_its_cause_first_and_no_other(path: Path) -> None:
    code = parts(path)[0]
    outcome = diagnosed(path.read_bytes())
    found = outcome.findings
    assert found, "nothing was seen"
    assert found[0].code == code
    assert found[0].evidence
    if found[0].severity == "error":
        assert outcome.healthy is False
    elif outcome.healthy:
        assert path.name in REMARKS
    others = {item.code for item in found[1:] if item.severity == "error"}
    assert others - {"engine-dead-masked"} <= BESIDE.get(code, set())


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda item: f"{item['code']}: {item['text'].strip()[:30]}")
def test_a_pasted_message_shows_its_cause_without_the_log_around_it(fragment: dict[str, str]) -> None:
    found = diagnosed(fragment["text"].strip().encode() + b"\n").findings
    assert [item.code for item in found][:1] == [fragment["code"]]


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_lines_that_look_worse_than_they_are_alarm_nobody(path: Path) -> None:
    outcome = diagnosed(path.read_bytes())
    assert outcome.healthy is True
    assert [item.code for item in outcome.findings if item.severity == "error"] == []


PREFIXES = [
    b"vllm-1  | ",
    b"2026-02-08T09:00:12.123456789Z stderr F ",
    b"Feb 08 09:00:12 node7 vllm[4711]: ",
    b"\x1b[0;36m",
]


@pytest.mark.parametrize("place", range(len(PREFIXES)), ids=["compose", "kubernetes", "journald", "colour"])
def test_what_a_container_or_a_journal_puts_before_each_line_changes_nothing(place: int) -> None:
    lost = []
    for path in FAILED[place :: len(PREFIXES)]:
        text = b"".join(PREFIXES[place] + line + b"\n" for line in path.read_bytes().splitlines())
        dressed = [item.code for item in diagnosed(text).findings][:1]
        if dressed != [parts(path)[0]]:
            lost.append((path.name, dressed))
    assert lost == []


def test_every_code_that_a_log_can_show_has_a_log_and_a_wording() -> None:
    logged = {parts(path)[0] for path in FAILED}
    worded = {entry.code for entry in ENTRIES}
    assert sorted(worded ^ logged) == sorted(ONLY_BESIDE)
    assert set(codes()) >= WITHOUT_LOG
    assert sorted(WITHOUT_LOG & worded) == []


def test_the_popular_families_of_versions_have_logs() -> None:
    versions = {tuple(map(int, parts(path)[2].split("."))) for path in LOGS if parts(path)[1] == "vllm"}
    for low, high in (((0, 6), (0, 8)), ((0, 8), (0, 13)), ((0, 13), (0, 21)), ((0, 21), (0, 34))):
        assert len([version for version in versions if low <= version < high]) >= 2
    assert {parts(path)[1] for path in HEALTHY} == {"vllm", "sglang", "lmdeploy", "llamacpp"}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.code}: {entry.texts[0][:40]}")
def test_an_entry_names_a_known_code_and_its_sentence_can_be_filled(entry: Signature) -> None:
    assert entry.code in codes()
    assert entry.source.strip()
    groups = {name for text in (entry.pattern, entry.numbers) if text for name in re.compile(text).groupindex}
    said = set(re.findall(r"\{(\w+)\}", entry.says or ""))
    assert said <= groups
    assert not set(entry.yields_to) - set(codes())
    if entry.says is not None:
        assert entry.says.endswith((".", "}")), entry.says
