"""What comes from outside is shown with its control characters written out, in every text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadmaster.cli import main
from loadmaster.core.argv import parse_argv
from loadmaster.core.facts import Evidence, Finding, Fix, GpuFacts, ModelFacts, ModelFile
from loadmaster.failure import Failure
from loadmaster.render.cards import cards_text
from loadmaster.render.launch import check_text
from loadmaster.render.model import model_text
from loadmaster.render.paint import ansi
from loadmaster.render.sheet import sheet_text
from loadmaster.render.svg import sheet_svg
from loadmaster.render.visible import shown, visible, visible_log
from tests.core.launches import TEXT_8B, cards, plan

EVIL = "a\x1b]0;pwn\x07b\x1b[31m\x9b31m\u202e\r\x08\u2028\x00"
WRITTEN = "a\\x1b]0;pwn\\x07b\\x1b[31m\\x9b31m\\u202e\\r\\x08\\u2028\\x00"


def test_visible() -> None:
    assert visible(EVIL) == WRITTEN
    assert visible("café 模型 é 👍 a-b") == "café 模型 é 👍 a-b"
    assert visible("a\nb\tc") == "a\\nb\\tc" and visible("a\nb\tc", lines=True) == "a\nb\tc"
    assert visible("\udc80") == "\\udc80"
    assert visible_log("\x1b[0;36m(EngineCore)\x1b[0m x\x1b]0;t\x07\n") == "(EngineCore) x\\x1b]0;t\\x07\n"


@given(st.text())
def test_nothing_hidden_is_left(text: str) -> None:
    assert all(
        letter.isprintable() or letter in "\n\t" or not visible(letter).startswith("\\") for letter in visible(text)
    )
    assert "\x1b" not in visible(text, lines=True)
    assert visible(visible(text)) == visible(text)


def finding() -> Finding:
    return Finding(
        EVIL, "error", EVIL, EVIL, (Evidence(EVIL, EVIL, path=EVIL),), (Fix(EVIL, (EVIL,), (EVIL,), {EVIL: EVIL}, EVIL),)
    )  # fmt: skip


def everything() -> dict[str, Callable[[], str]]:
    launch = parse_argv(["vllm", "serve", EVIL, "--served-model-name", EVIL, "--" + EVIL, EVIL], env={"A": EVIL})
    launch = structs.replace(launch, image=EVIL)
    sheet = plan(TEXT_8B, cards(48), "--max-model-len 8192")
    sheet = structs.replace(
        sheet,
        findings=(finding(),),
        notes=(EVIL,),
        model=structs.replace(sheet.model, architecture=EVIL, name=EVIL, quantization=EVIL),
        gpus=tuple(structs.replace(gpu, name=EVIL) for gpu in sheet.gpus),
        launch=structs.replace(sheet.launch, argv=(EVIL,), env={EVIL: EVIL}),
    )
    model = ModelFacts(
        name=EVIL,
        path=EVIL,
        architecture=EVIL,
        files=(ModelFile(name=EVIL, bytes=1, kind=EVIL),),
        findings=(finding(),),
    )
    card = GpuFacts(index=0, name=EVIL, total_bytes=1 << 34, note=EVIL, uuid=EVIL)
    return {
        "check": lambda: check_text(launch, (finding(),), False, [EVIL]),
        "check coloured": lambda: check_text(launch, (finding(),), False, [EVIL], 80, ansi),
        "plan": lambda: sheet_text(sheet),
        "svg": lambda: sheet_svg(sheet),
        "inspect": lambda: model_text(model),
        "gpus": lambda: cards_text((card,)),
    }


@pytest.mark.parametrize("name", list(everything()))
def test_every_text(name: str) -> None:
    text = everything()[name]()
    assert "pwn" in text
    for hidden in ("\x1b]", "\x1b[31mb", "\x07", "\x9b", "\u202e", "\r", "\x08", "\u2028", "\x00"):
        assert hidden not in text, repr(hidden)
    if "coloured" not in name:
        assert "\x1b" not in text


def test_a_forged_line_does_not_stand_alone() -> None:
    launch = parse_argv(["vllm", "serve", "m", "--served-model-name", "x\n\nCLEAR TO LAUNCH: no findings\n"])
    assert "\nCLEAR" not in check_text(launch, (), False, [])


def test_failures(capsys: pytest.CaptureFixture[str]) -> None:
    Failure(EVIL, EVIL).show()
    text = capsys.readouterr().err
    assert "\x1b" not in text and "\\x1b" in text


def test_shown_keeps_what_needs_nothing() -> None:
    sheet = plan(TEXT_8B, cards(48), "--max-model-len 8192")
    assert shown(sheet) is sheet
    nested = {"a": [{"b\x1b": ("c\x07",)}]}
    assert shown(nested) == {"a": [{"b\\x1b": ("c\\x07",)}]}


def test_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["x\x1b[31m"], ["plan", "--gp\x1b]0;t\x07"], ["gpus", "a\x1bb"]):
        with pytest.raises(SystemExit):
            main(words)
        text = capsys.readouterr().err
        assert "\x1b" not in text and "\\x1b" in text
