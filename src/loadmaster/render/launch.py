"""The checklist before launch as text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from loadmaster.core.facts import Finding, LaunchArgs
from loadmaster.render.findings import findings_text, summary
from loadmaster.render.lines import wrap
from loadmaster.render.paint import Paint, plain
from loadmaster.render.visible import shown


def check_text(
    launch: LaunchArgs,
    findings: Sequence[Finding],
    ok: bool | None,
    not_checked: Sequence[str],
    width: int = 80,
    paint: Paint = plain,
) -> str:
    """What was understood, the findings, what was not checked, and the verdict last."""
    launch, findings, not_checked = shown(launch, lines=False), shown(findings), shown(not_checked)
    blocks = [_launch(launch, paint)]
    if findings:
        blocks.append(findings_text(findings, width, paint))
    if not_checked:
        blocks.append("\n".join(line for each in not_checked for line in wrap(each, width, "not checked: ", "  ")))
    verdict = {
        True: paint("CLEAR TO LAUNCH", "bold", "green"),
        False: paint("DO NOT LAUNCH", "bold", "red"),
        None: paint("COULD NOT TELL", "bold", "yellow"),
    }[ok]
    blocks.append(f"{verdict}: {summary(findings)}")
    return "\n\n".join(blocks)


def _launch(launch: LaunchArgs, paint: Paint) -> str:
    lines = [f"{paint('model', 'bold')}  {launch.model or 'none named'}"]
    if launch.image:
        lines.append(f"{paint('image', 'bold')}  {launch.image}")
    if launch.env:
        lines.append(
            f"{paint('env', 'bold')}    "
            + " ".join(f"{name}={_shown(name, value)}" for name, value in launch.env.items())
        )
    for flag, value in launch.flags.items():
        lines.append(f"  {flag_text(flag, value)}")
    for flag in launch.unknown_flags:
        lines.append(f"  {flag}   (unknown)")
    return "\n".join(lines)


def flag_text(flag: str, value: object) -> str:
    """A flag as one would write it; secrets are not shown."""
    if value is True:
        return flag
    if value is False:
        return "--no-" + flag.removeprefix("--")
    values = value if isinstance(value, list) else [value]
    words = [json.dumps(v) if isinstance(v, dict | list) else str(v) for v in values]
    if is_secret(flag):
        words = ["***" for _ in words]
    return " ".join([flag, *(shlex.quote(word) for word in words)])


def is_secret(name: str) -> bool:
    """Whether a flag or variable of this name holds a secret."""
    upper = name.upper().replace("-", "_").strip("_")
    return any(
        upper == word or upper.endswith("_" + word) for word in ("TOKEN", "API_KEY", "KEY", "SECRET", "PASSWORD")
    )


def _shown(name: str, value: str) -> str:
    return "***" if is_secret(name) else shlex.quote(value)
