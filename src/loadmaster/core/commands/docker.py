"""``docker run`` and its like: the options before the image, the image, and the words given to its entry point."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from loadmaster.core.commands.found import docker_size, is_path, listed, mount_of

PROGRAMS = frozenset({"docker", "podman", "nerdctl", "docker.exe", "podman.exe"})

# Options of docker, podman and nerdctl that stand alone; any other takes a value.
_ALONE = frozenset(
    [
        "--detach",
        "--interactive",
        "--tty",
        "--rm",
        "--init",
        "--privileged",
        "--read-only",
        "--no-healthcheck",
        "--publish-all",
        "--oom-kill-disable",
        "--sig-proxy",
        "--disable-content-trust",
        "--help",
        "--quiet",
        "--replace",
        "--tls-verify",
        "--no-hosts",
        "--no-hostname",
        "--env-host",
        "--http-proxy",
        "--rmi",
        "--systemd",
        "--passwd",
        "--use-api-socket",
    ]
)
_SHORT_ALONE = frozenset("ditPq")


class ContainerRun(Struct):
    """One ``run``: what the engine in it will see."""

    image: str | None = None
    entrypoint: str | None = None
    words: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    gpus: int | None = None
    shm_bytes: int | None = None
    ipc_host: bool = False
    mounts: list[tuple[str, str]] = field(default_factory=list)
    gpu_access: bool = False


def run_start(words: Sequence[str]) -> int | None:
    """Where the words after ``docker run`` begin, None if this is no such command."""
    for index, word in enumerate(words[:40]):
        if re.split(r"[/\\]", word)[-1].lower() not in PROGRAMS:
            continue
        rest = index + 1
        while rest < len(words) and words[rest].startswith("-"):  # docker --context x run
            rest += 1 if "=" in words[rest] or words[rest] in ("-D", "--debug", "--tls") else 2
        if rest < len(words) and words[rest] == "container":
            rest += 1
        if rest < len(words) and words[rest] in ("run", "create"):
            return rest + 1
    return None


def read_run(words: Sequence[str], environment: Mapping[str, str]) -> ContainerRun:
    """``words`` after ``docker run``. ``environment``: what ``-e NAME`` without a value takes it from."""
    run = ContainerRun()
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or word in ("-", "--"):
            if word == "--" and at < len(words):
                word = words[at]
                at += 1
            run.image = word
            run.words = list(words[at:])
            break
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if not equals and name not in _ALONE:
                value = words[at] if at < len(words) else ""
                at += 1
        else:
            name, value, took = _short(word, words[at] if at < len(words) else "")
            at += took
        _apply(run, name, value, environment)
    return run


def _short(word: str, following: str) -> tuple[str, str, int]:
    """(option, value, words taken after it) of ``-it``, ``-p 8000:8000``, ``-eX=1``, ``-dp 80:80``."""
    letters = word[1:]
    for index, letter in enumerate(letters):
        if letter not in _SHORT_ALONE:
            value = letters[index + 1 :]
            return ("-" + letter, value.removeprefix("="), 0) if value else ("-" + letter, following, 1)
    return word, "", 0


def _apply(run: ContainerRun, name: str, value: str, environment: Mapping[str, str]) -> None:
    if name in ("-e", "--env"):
        key, equals, text = value.partition("=")
        if equals:
            run.env[key] = text
        elif key in environment:
            run.env[key] = environment[key]
    elif name == "--entrypoint":
        run.entrypoint = value
    elif name == "--gpus":
        run.gpus = given_gpus(value)
        run.gpu_access = True
    elif name == "--device":
        run.gpu_access = run.gpu_access or is_gpu_device(value)
        if value.startswith("nvidia.com/gpu=") and value.split("=", 1)[1] != "all":
            run.gpus = (run.gpus or 0) + 1
    elif name in ("--privileged", "--hooks-dir") or (name == "--runtime" and "nvidia" in value):
        run.gpu_access = True
    elif name in ("-v", "--volume"):
        mount = mount_of(value)
        if mount is not None:
            run.mounts.append(mount)
    elif name == "--mount":
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        source = parts.get("source") or parts.get("src") or ""
        target = parts.get("target") or parts.get("destination") or parts.get("dst") or ""
        if parts.get("type") == "bind" and is_path(source) and target:
            run.mounts.append((source, target))
    elif name == "--shm-size":
        run.shm_bytes = docker_size(value)
    elif name == "--ipc":
        run.ipc_host = value == "host"


def is_gpu_device(value: str) -> bool:
    """Whether a device of the host is a card: NVIDIA's, AMD's, Intel's, or one by the container device interface."""
    return re.match(r"nvidia\.com/|amd\.com/|/dev/(?:nvidia|kfd|dri|davinci|accel|vfio|dxg)", value) is not None


def given_gpus(value: str) -> int | None:
    """``all``, ``2``, ``device=0,1``, ``"device=0,1"``, ``count=2``: the number of cards, None for all."""
    value = value.strip().strip("\"'")
    if value.isdigit():
        return int(value)
    count = re.search(r"count=(\d{1,4})", value)
    if count:
        return int(count.group(1))
    devices = re.search(r"(?:device|device_ids)=([^\"']+)", value)
    if devices:
        return listed(re.sub(r",?(?:capabilities|driver|options)=.*", "", devices.group(1)))
    return None
