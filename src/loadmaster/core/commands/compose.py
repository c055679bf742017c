"""A Docker Compose file, parsed -> the launch of its vLLM service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loadmaster.core.commands.docker import given_gpus, is_gpu_device
from loadmaster.core.commands.found import Found, docker_size, is_path, listed, mount_of
from loadmaster.core.commands.invocation import entry, gpus_by_environment
from loadmaster.core.commands.parameters import Variables, expand_text
from loadmaster.core.commands.shell import Shell

_SERVICE_KEYS = {"image", "command", "entrypoint", "build", "container_name", "environment", "ports", "volumes"}


def read_compose(document: Any) -> Found | None:
    """The first service that runs vLLM; None if the document is no compose file or has none."""
    return next(compose_launches(document), None)


def compose_launches(document: Any) -> Iterator[Found]:
    """Every service that runs vLLM, in the file's order.

    ``document``: mappings, lists and text only (numbers and truth values as the file spells them, null is None).
    A lone service, or services without the ``services:`` line above them, are read too.
    """
    for name, service in _services(document):
        found = _service(service)
        if found is not None:
            found.kind = "compose"
            found.name = name
            yield found


def _services(document: Any) -> Iterator[tuple[str | None, Mapping[str, Any]]]:
    if not isinstance(document, dict):
        return
    services = document.get("services")
    if isinstance(services, dict):
        yield from ((str(name), service) for name, service in services.items() if isinstance(service, dict))
        return
    if "image" in document and len(_SERVICE_KEYS & document.keys()) >= 2:
        yield None, document
        return
    for name, service in document.items():
        if isinstance(service, dict) and len(_SERVICE_KEYS & service.keys()) >= 2:
            yield str(name), service


def _service(service: Mapping[str, Any]) -> Found | None:
    image = interpolate(str(service.get("image") or "")) or None
    env = _environment(service.get("environment"))
    found = entry(_words(service.get("entrypoint")), _words(service.get("command")), image, env)
    if found is None:
        return None
    found.gpus = _gpus(service)
    size = service.get("shm_size")
    found.shm_bytes = docker_size(interpolate(str(size))) if size is not None else None
    found.ipc_host = str(service.get("ipc") or "") == "host"
    found.mounts = list(_mounts(service.get("volumes")))
    found.gpu_access = _gpu_access(service) or gpus_by_environment(env, image)
    return found


def _mounts(volumes: Any) -> Iterator[tuple[str, str]]:
    """Bind mounts in the short and in the long form."""
    for volume in volumes if isinstance(volumes, list) else []:
        if isinstance(volume, str):
            mount = mount_of(interpolate(volume))
            if mount is not None:
                yield mount
        elif isinstance(volume, dict) and volume.get("type") in (None, "bind"):
            source, target = interpolate(str(volume.get("source") or "")), interpolate(str(volume.get("target") or ""))
            if is_path(source) and target:
                yield source, target


def _gpu_access(service: Mapping[str, Any]) -> bool:
    """Whether anything in the service hands it cards; a part that another file gives is taken to do so."""
    if service.get("gpus") or "nvidia" in str(service.get("runtime") or ""):
        return True
    if str(service.get("privileged") or "").lower() == "true" or service.get("extends"):
        return True
    devices = service.get("devices")
    if any(is_gpu_device(str(device)) for device in (devices if isinstance(devices, list) else [])):
        return True
    return bool(_reserved(service))


def _reserved(service: Mapping[str, Any]) -> Any:
    """What ``deploy.resources.reservations`` (or ``limits``) names as devices."""
    node: Any = service
    for key in ("deploy", "resources", "reservations"):
        node = node.get(key) if isinstance(node, dict) else None
    return (node.get("devices") or node.get("generic_resources")) if isinstance(node, dict) else None


def interpolate(text: str) -> str:
    """``${X:-default}``, also nested, filled in; ``$$`` is a dollar; a variable without default stays as written."""
    held = text.replace("$$", "\0")
    return expand_text(held, Variables(), unquote=False).replace("\0", "$")


def _words(value: Any) -> list[str]:
    """``command`` and ``entrypoint``: a list is taken as it is, a string is split as a shell would."""
    if isinstance(value, list):
        return [interpolate("" if item is None else str(item)) for item in value]
    if not isinstance(value, str):
        return []
    # what the interpolation put in place is text: a dollar in it is no variable any more
    shell = Shell(interpolate(value.replace("\\\n", " ").replace("\n", " ").replace("#", "\\#")), plain_dollars=True)
    return [word for command in shell.commands() for word in command.words] if value.strip() else []


def _environment(value: Any) -> dict[str, str]:
    """A map or a list; a name without a value is taken from outside, so it is not known here."""
    if isinstance(value, dict):
        return {str(name): interpolate(str(text)) for name, text in value.items() if text is not None}
    found = {}
    for item in value if isinstance(value, list) else []:
        name, equals, text = str(item).partition("=")
        if equals:
            found[name.strip()] = interpolate(text)
    return found


def _gpus(service: Mapping[str, Any]) -> int | None:
    """Cards from ``gpus:`` or ``deploy.resources.reservations.devices``; None for all or unsaid."""
    given = service.get("gpus")
    if isinstance(given, str):
        return given_gpus(interpolate(given))
    devices = given
    for key in ("deploy", "resources", "reservations", "devices") if devices is None else ():
        source = service if key == "deploy" else devices
        devices = source.get(key) if isinstance(source, dict) else None
    counts = []
    for device in devices if isinstance(devices, list) else []:
        if not isinstance(device, dict):
            continue
        identifiers, count = device.get("device_ids"), device.get("count")
        if isinstance(identifiers, list):
            counts.append(listed(",".join(interpolate(str(item)) for item in identifiers)))
        elif count is not None and interpolate(str(count)).isdigit():
            counts.append(int(interpolate(str(count))))
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
