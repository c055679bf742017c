"""Kubernetes manifests, parsed -> the launch of the vLLM container in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from loadmaster.core.commands.found import Found, kubernetes_size
from loadmaster.core.commands.invocation import entry, known_flags_in

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][\w.-]*)\)")
_MAX_DEPTH = 40


def read_kubernetes(document: Any) -> Found | None:
    """The first container that runs vLLM, wherever in the document it stands; None if there is none."""
    return next(kubernetes_launches(document), None)


def kubernetes_launches(document: Any) -> Iterator[Found]:
    """Every container that runs vLLM, named by its manifest where that has a name, else by its own.

    ``document``: mappings, lists and text only. Custom resources are read too: any mapping that has ``args`` or
    ``command`` counts as a container.
    """
    metadata = document.get("metadata") if isinstance(document, dict) else None
    owner = metadata.get("name") if isinstance(metadata, dict) else None
    named: set[str] = set()
    for container, pod in _containers(document, None, 0):
        found = _container(container, pod)
        if found is None:
            continue
        found.kind = "kubernetes"
        names = [str(name) for name in (owner, container.get("name")) if isinstance(name, str)]
        found.name = names[0] if names and names[0] not in named else "/".join(names) or None
        named.add(found.name or "")
        yield found


def _containers(node: Any, pod: Mapping[str, Any] | None, depth: int) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """(container, the pod's spec around it)."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(node, dict):
        if isinstance(node.get("containers"), list):
            pod = node
        if isinstance(node.get("args"), list | str) or isinstance(node.get("command"), list | str):
            yield node, pod
        for key, value in node.items():
            if key != "initContainers":
                yield from _containers(value, pod, depth + 1)
    elif isinstance(node, list):
        for item in node:
            yield from _containers(item, pod, depth + 1)


def _container(container: Mapping[str, Any], pod: Mapping[str, Any] | None) -> Found | None:
    env = _environment(container.get("env"))
    command = [substitute(word, env) for word in _words(container.get("command"))]
    arguments = [substitute(word, env) for word in _words(container.get("args"))]
    image = container.get("image")
    image = str(image) if isinstance(image, str) else None
    found = entry(command, arguments, image, env)
    if found is None and not command and known_flags_in(arguments) >= 1 and image is None:
        found = Found(kind="kubernetes", words=arguments, env=env)
    if found is None:
        return None
    found.gpus = _gpus(container)
    found.shm_bytes = _shared_memory(container, pod)
    found.ipc_host = str((pod or {}).get("hostIPC") or "").lower() == "true"
    found.mounts = list(_mounts(container, pod))
    return found


def _mounts(container: Mapping[str, Any], pod: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Folders of the node: ``hostPath`` volumes that the container mounts."""
    volumes, mounts = (pod or {}).get("volumes"), container.get("volumeMounts")
    paths: dict[str, str] = {}
    for volume in volumes if isinstance(volumes, list) else []:
        place = volume.get("hostPath") if isinstance(volume, dict) else None
        if isinstance(place, dict) and place.get("path"):
            paths[str(volume.get("name"))] = str(place["path"])
    for mount in mounts if isinstance(mounts, list) else []:
        if not isinstance(mount, dict) or str(mount.get("name")) not in paths or not mount.get("mountPath"):
            continue
        inner = str(mount.get("subPath") or "").strip("/")
        source = paths[str(mount["name"])].rstrip("/") + (f"/{inner}" if inner else "")
        yield source or "/", str(mount["mountPath"])


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.split()
    return ["" if item is None else str(item) for item in value] if isinstance(value, list) else []


def _environment(value: Any) -> dict[str, str]:
    """Entries with a ``value``; what comes from a secret or a field is not known here."""
    env: dict[str, str] = {}
    for item in value if isinstance(value, list) else []:
        if isinstance(item, dict) and item.get("name") is not None and item.get("value") is not None:
            env[str(item["name"])] = substitute(str(item["value"]), env)
    return env


def substitute(text: str, env: Mapping[str, str]) -> str:
    """``$(NAME)`` filled in from the container's own variables; ``$$`` is a dollar; an unknown one stays."""

    def value(match: re.Match[str]) -> str:
        return "$" if match.group(1) is None else env.get(match.group(1), match.group())

    return _REFERENCE.sub(value, text)


def _gpus(container: Mapping[str, Any]) -> int | None:
    resources = container.get("resources")
    for part in ("limits", "requests"):
        amounts = resources.get(part) if isinstance(resources, dict) else None
        for name, amount in amounts.items() if isinstance(amounts, dict) else ():
            if re.fullmatch(r"(?:nvidia\.com/(?:gpu|mig-.*)|amd\.com/gpu|gpu\.intel\.com/.*)", str(name)):
                return int(str(amount)) if str(amount).isdigit() else None
    return None


def _shared_memory(container: Mapping[str, Any], pod: Mapping[str, Any] | None) -> int | None:
    """The size limit of the memory volume mounted at ``/dev/shm``."""
    mounts = container.get("volumeMounts")
    names = {
        str(mount.get("name"))
        for mount in (mounts if isinstance(mounts, list) else [])
        if isinstance(mount, dict) and str(mount.get("mountPath")).rstrip("/") == "/dev/shm"
    }
    volumes = (pod or {}).get("volumes")
    for volume in volumes if isinstance(volumes, list) else []:
        directory = volume.get("emptyDir") if isinstance(volume, dict) else None
        if isinstance(directory, dict) and str(volume.get("name")) in names and directory.get("sizeLimit"):
            return kubernetes_size(str(directory["sizeLimit"]))
    return None
