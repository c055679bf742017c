"""Damaged commands, containers without cards, files that are not there, flags of engines long gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from loadmaster.core.commands.text import read_shell_text
from loadmaster.core.facts import HostFacts, LaunchArgs
from tests.launchcases import codes, dense, found, launch_of, of


def read(text: str, version: str | None = None) -> LaunchArgs:
    return read_shell_text(text).launch(version)


def test_a_command_that_loses_flags_is_not_clear_to_launch() -> None:
    launch = read("A=1 vllm serve m \\ # the model\n --port 9000 \\\n --max-modl-len 4k --max-num-seqs x")
    item = of(found(launch), "command-damaged")
    assert item.severity == "error"
    assert [line.text for line in item.evidence] == [
        "a comment after the backslash: the command ends here, and the shell never sees what follows",
        "lost: --port 9000 --max-num-seqs x --max-modl-len",
        "in the lost part: no vLLM release has --max-modl-len; did you mean --max-model-len?",
        "in the lost part: --max-num-seqs 'x' is no whole number",
    ]
    assert [fix.command for fix in item.fixes] == ["A=1 vllm serve m --port 9000 --max-modl-len 4k --max-num-seqs x"]


def test_damage_that_loses_nothing_is_a_warning() -> None:
    item = of(found(read("vllm serve m –port 9000")), "command-damaged")
    assert (item.severity, item.fixes[0].command) == ("warning", "vllm serve m --port 9000")


@pytest.mark.parametrize(
    ("flags", "fixes"),
    [
        ("--swap-space 16", [((), ("--swap-space",))]),
        ("--num-scheduler-steps 8", [((), ("--num-scheduler-steps",))]),
        ("--disable-log-requests", [((), ("--disable-log-requests",))]),
        ("--enable-reasoning", [((), ("--enable-reasoning",))]),
        ("--max-model-len 4096", None),
    ],
)
def test_flags_that_no_planned_release_knows(flags: str, fixes: list[tuple[tuple[str, ...], ...]] | None) -> None:
    """Without a version they are known flags of some release, and the release that one installs today refuses them."""
    launch = launch_of(f"vllm serve m {flags}")
    assert launch.unknown_flags == ()
    findings = [item for item in found(launch) if item.code in ("unknown-flag", "flag-deprecated")]
    if fixes is None:
        assert findings == []
        return
    assert findings[0].severity == "warning"
    assert "last in vLLM 0." in findings[0].evidence[0].text
    assert [(fix.argv, fix.remove) for fix in findings[0].fixes] == fixes


@pytest.mark.parametrize(("kind", "word"), [("docker-run", "docker run --gpus all"), ("compose", "reservations")])
def test_a_container_without_cards(kind: str, word: str) -> None:
    item = of(found(launch_of("vllm serve m", kind=kind, gpu_access=False)), "container-without-gpu")
    assert (item.severity, item.confidence) == ("warning", "likely")
    assert word in (item.fixes[0].command or "")
    for access in (True, None):
        assert "container-without-gpu" not in codes(found(launch_of("vllm serve m", kind=kind, gpu_access=access)))


def test_a_template_that_is_not_there() -> None:
    """It ends the start, and does not make up for a checkpoint without a template."""
    command = "vllm serve m --chat-template /nope.jinja"
    gone = HostFacts(missing_files=("/nope.jinja",))
    item = of(found(command, dense(has_chat_template=True), host=gone), "chat-template-missing")
    assert item.severity == "error" and item.fixes[0].remove == ("--chat-template",)
    item = of(found(command, dense(has_chat_template=False), host=gone), "chat-template-missing")
    assert "brings no template of its own" in item.cause and item.fixes[0].argv == ("--chat-template", "FILE")
    assert "chat-template-missing" not in codes(found(command, dense(has_chat_template=False), host=HostFacts()))
    other = found("vllm serve m --tokenizer /nope", dense(), host=replace(gone, missing_files=("/nope",)))
    assert of(other, "flag-value-invalid").cause == "--tokenizer names /nope, which is not there."
