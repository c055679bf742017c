"""What copying did to the command: what the shell would not pass on, and the command put right."""

from __future__ import annotations

from collections.abc import Iterator

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.checks.spelling import nearest
from loadmaster.core.commands.found import CUT
from loadmaster.core.facts import EngineFacts, Evidence, Finding, Fix, LaunchArgs

_ENGINE = EngineFacts("vllm")


def check_damage(case: LaunchCase) -> Iterator[Finding]:
    """An error where the engine would start without a part of the command."""
    launch = case.launch
    if not launch.damage:
        return
    lost = list(_lost(launch))
    cut = bool(lost) or any(CUT in item.text for item in launch.damage)
    cause = "What the shell would run is not what the text seems to say."
    if cut:
        cause = "The shell passes on only a part of the command, and only that part is checked here."
    yield finding(
        "command-damaged",
        cause,
        evidence=[*launch.damage, *lost, *_typos(case)],
        fixes=[_fix(launch)],
        severity="error" if cut else "warning",
    )


def _lost(launch: LaunchArgs) -> Iterator[Evidence]:
    """What the whole command says and the shell does not pass on."""
    whole = launch.whole
    if whole is None:
        return
    if whole.model != launch.model and whole.model is not None:
        yield Evidence("command", f"lost: the model {whole.model}")
    view = LaunchCase(whole, None, None, _ENGINE, None)
    words = [view.shown(flag) for flag, value in whole.flags.items() if launch.flags.get(flag) != value]
    words += [flag for flag in whole.unknown_flags if flag not in launch.unknown_flags]
    if words:
        yield Evidence("command", "lost: " + " ".join(words))


def _typos(case: LaunchCase) -> Iterator[Evidence]:
    """What would be wrong in the lost part too."""
    whole = case.launch.whole
    if whole is None:
        return
    who = f"vLLM {case.version} has no" if case.version else "no vLLM release has"
    for flag in whole.unknown_flags:
        if flag not in case.launch.unknown_flags:
            near = nearest(flag, case.version)
            yield Evidence("command", f"in the lost part: {who} {flag}" + (f"; did you mean {near}?" if near else ""))
    said = {item.text for item in case.launch.refused}
    for item in whole.refused:
        if item.text not in said:
            yield Evidence("command", f"in the lost part: {item.text}")


def _fix(launch: LaunchArgs) -> Fix:
    if launch.repaired:
        return Fix("The whole command, its lines joined again.", command=launch.repaired)
    if not launch.argv or any(CUT in item.text for item in launch.damage):
        return Fix(
            "Join the lines again: the mark that continues a line as the last character of every line but the last."
        )
    from shlex import join, quote

    words = [f"{name}={quote(value)}" for name, value in launch.env.items()]
    return Fix("The command as it was read here.", command=" ".join([*words, join(launch.argv)]))
