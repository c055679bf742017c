"""What stands around a containerised engine: the cards that the container is given, the files that it names."""

from __future__ import annotations

from collections.abc import Iterator

from loadmaster.core.checks.case import LaunchCase
from loadmaster.core.checks.catalogue import finding
from loadmaster.core.commands.found import image_version
from loadmaster.core.engineversion import version_key
from loadmaster.core.facts import Evidence, Finding, Fix

_RESERVATION = "deploy: {resources: {reservations: {devices: [{driver: nvidia, count: all, capabilities: [gpu]}]}}}"


def check_container(case: LaunchCase) -> Iterator[Finding]:
    """The engine in the image against the version that is checked; cards for the container."""
    yield from _image(case)
    if case.launch.gpu_access is not False or case.launch.kind not in ("docker-run", "compose"):
        return
    if case.launch.kind == "compose":
        words = f"the service{' ' + case.launch.name if case.launch.name else ''} has no gpus, devices or runtime"
        fixes = [Fix("Reserve the cards for the service.", command=_RESERVATION)]
    else:
        words = "neither --gpus nor --runtime nvidia nor --device"
        fixes = [Fix("Give the container all cards.", command="docker run --gpus all ...")]
    yield finding(
        "container-without-gpu",
        "The engine in the container sees no card, unless the daemon's default runtime hands them out.",
        evidence=[Evidence("command", words)],
        fixes=fixes,
        confidence="likely",
    )


def _image(case: LaunchCase) -> Iterator[Finding]:
    tagged = image_version(case.launch.image)
    if tagged is None or case.version is None:
        return
    parts = 3 if min(tagged.count("."), case.version.count(".")) > 1 else 2  # "0.24" says nothing of the patch
    if version_key(tagged)[:parts] == version_key(case.version)[:parts]:
        return
    yield finding(
        "flag-conflict",
        f"The image has vLLM {tagged}, and the command is checked for {case.version}.",
        evidence=[Evidence("command", f"image {case.launch.image}"), Evidence("command", f"version {case.version}")],
        fixes=[Fix(f"Check it for what the image has: --engine-version {tagged}, or leave that out.")],
        severity="warning",
    )


def check_named_files(case: LaunchCase) -> Iterator[Finding]:
    """Files that the command names by a path and that are not on the machine that has the model."""
    missing = case.host.missing_files if case.host is not None else ()
    for flag in case.launch.flags:
        path = case.text(flag)
        if path is None or path not in missing:
            continue
        if flag == "--chat-template":
            own = case.model.has_chat_template if case.model is not None else None
            cause = f"{path} is not there: the engine ends at once."
            if own is False:
                cause += " The checkpoint brings no template of its own either."
            fixes = [Fix("Without it the checkpoint's own template is used.", remove=(flag,))] if own else []
            yield finding(
                "chat-template-missing",
                cause,
                evidence=[*case.evidence(flag), Evidence("host", f"no such file: {path}")],
                fixes=fixes or [Fix("The path of a template of the model's family.", (flag, "FILE"))],
                severity="error",
                confidence="certain" if not case.in_container else "likely",
            )
        else:
            yield finding(
                "flag-value-invalid",
                f"{flag} names {path}, which is not there.",
                evidence=[*case.evidence(flag), Evidence("host", f"no such file: {path}")],
                confidence="certain" if not case.in_container else "likely",
            )
