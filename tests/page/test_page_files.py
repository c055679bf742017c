"""What is shipped: libraries as they were copied, every string in both languages, small modules, under 120 kB."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest

STATIC = Path(__file__).parents[2] / "src" / "loadmaster" / "service" / "static"
VENDOR, PAGE = STATIC / "vendor", STATIC / "page"
WEB = Path(__file__).parents[2] / "web"
MODULES = sorted(PAGE.glob("*.js"))
MOST_COMPRESSED = 120_000


def test_libraries_are_what_the_list_says() -> None:
    listed = json.loads((VENDOR / "hashes.json").read_text())
    lock = json.loads((WEB / "package-lock.json").read_text())["packages"]
    for name, facts in listed.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == facts["sha256"], name
        assert lock[f"node_modules/{facts['package']}"]["version"] == facts["version"], name
        assert (VENDOR / facts["licence_file"]).stat().st_size > 500, name
    there = {path.name for path in VENDOR.iterdir() if path.suffix in (".js", ".css")}
    assert there == set(listed)


def test_the_lock_names_no_registry_of_its_own() -> None:
    for address in re.findall(r'"resolved": "([^"]+)"', (WEB / "package-lock.json").read_text()):
        assert address.startswith("https://registry.npmjs.org/"), address


def test_the_whole_page_is_under_120_kb_compressed() -> None:
    files = [path for path in sorted(STATIC.rglob("*")) if path.suffix in (".js", ".css", ".html", ".svg")]
    whole = b"".join(path.read_bytes() for path in files)
    assert len(gzip.compress(whole, 9)) < MOST_COMPRESSED


def test_modules_are_small() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in MODULES if path.name != "catalogue.js"}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_no_script_or_style_stands_in_the_index() -> None:
    text = (STATIC / "index.html").read_text()
    assert "<style" not in text
    assert " style=" not in text
    assert re.findall(r"<script[^>]*>([^<]+)", text) == []
    assert re.findall(r"\son\w+=", text) == []


def test_the_index_preloads_what_the_page_begins_with() -> None:
    text = (STATIC / "index.html").read_text()
    named = {Path(address).name for address in re.findall(r'modulepreload" href="([^"]+)"', text)}
    later = {"live.js", "uplot.js"}  # loaded with the charts
    there = {path.name for path in [*MODULES, *VENDOR.glob("*.js")]}
    assert named == there - later


# ------------------------------------------------------------------------------------------- the catalogue


def _catalogue() -> dict[str, dict[str, list[str]]]:
    """Language -> key -> its strings, read from the module's text."""
    text = (PAGE / "catalogue.js").read_text()
    found: dict[str, dict[str, list[str]]] = {}
    for language, body in re.findall(r"^  (\w+): \{\n(.*?)^  \},$", text, re.DOTALL | re.MULTILINE):
        entries = re.findall(r'^    (?:"([^"]+)"|(\w+)): (.+),$', body, re.MULTILINE)
        found[language] = {quoted or bare: re.findall(r'"((?:[^"\\]|\\.)*)"', value) for quoted, bare, value in entries}
        assert len(found[language]) == len([line for line in body.splitlines() if line.strip()])
    return found


CATALOGUE = _catalogue()
ENGLISH, CHINESE = CATALOGUE["en"], CATALOGUE["zh"]


def test_both_languages_have_every_string() -> None:
    assert set(CATALOGUE) == {"en", "zh"}
    assert set(ENGLISH) == set(CHINESE)


@pytest.mark.parametrize("key", sorted(ENGLISH))
def test_a_string_is_whole(key: str) -> None:
    def names(texts: list[str]) -> list[set[str]]:
        return [set(re.findall(r"\{(\w+)\}", text)) for text in texts]

    english, chinese = ENGLISH[key], CHINESE[key]
    assert all(english)
    assert all(chinese)
    assert len(chinese) in (1, len(english))  # Chinese has one form for every number
    if len(english) == 1:
        assert names(english) == names(chinese)
    else:
        assert names(english)[1] == names(chinese)[-1]
    for text in [*english, *chinese]:
        assert "!" not in text
        assert "！" not in text


def test_terms_are_the_same_everywhere() -> None:
    for word, term in {"load sheet": "装载单", "KV cache": "KV 缓存", "queue": "队"}.items():
        for key, texts in ENGLISH.items():
            if any(re.search(rf"\b{word}\b", text) for text in texts):
                assert all(term in text for text in CHINESE[key]), key


def _keys_used() -> tuple[set[str], set[str]]:
    whole, begun = set(), set()
    for path in MODULES:
        if path.name == "catalogue.js":
            continue
        text = path.read_text()
        whole |= set(re.findall(r'"([a-z][\w.-]*)"', text))
        begun |= set(re.findall(r"`([a-z]+\.)\$\{", text))
    return whole, begun


def test_every_key_that_is_asked_for_is_there_and_none_is_left_over() -> None:
    whole, begun = _keys_used()
    asked = set()
    for path in MODULES:
        asked |= set(re.findall(r'\bt\(\s*"([^"]+)"', path.read_text()))
    assert asked - set(ENGLISH) == set()
    assert {key for key in ENGLISH if key not in whole and not key.startswith(tuple(begun))} == set()


def _without_holes(template: str) -> str:
    """A template's text without its ${...}, nested ones too."""
    kept, depth, at = [], 0, 0
    while at < len(template):
        if template.startswith("${", at):
            depth += 1
            at += 2
        elif depth and template[at] == "{":
            depth += 1
            at += 1
        elif depth and template[at] == "}":
            depth -= 1
            kept.append("\x00" if depth == 0 else "")
            at += 1
        else:
            if depth == 0:
                kept.append(template[at])
            at += 1
    return "".join(kept)


def _templates(text: str) -> list[str]:
    """Each html`...` of a module, outer ones with their inner ones cut out, inner ones on their own."""
    found = []
    for start in (match.end() for match in re.finditer(r"html`", text)):
        depth, at = 0, start
        while True:
            if text.startswith("${", at):
                depth += 1
                at += 2
                continue
            if text[at] == "}" and depth:
                depth -= 1
            elif text[at] == "{" and depth:
                depth += 1
            elif text[at] == "`" and depth == 0:
                break
            at += 1
        found.append(text[start:at])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_no_word_of_the_page_is_written_outside_the_catalogue(path: Path) -> None:
    for template in _templates(path.read_text()):
        bare = _without_holes(template)
        spoken = re.findall(r'(?:aria-label|title|placeholder|alt)="([^"\x00]*[A-Za-z一-鿿][^"\x00]*)"', bare)
        assert spoken == []
        between = re.sub(r"<[^<>]*>", " ", bare)
        words = set(re.findall(r"[A-Za-z一-鿿]+", between)) - {"loadmaster"}
        assert words == set(), template[:200]
