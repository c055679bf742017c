"""Collects what a bug report needs of this machine, and of one deployment on it."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from loadmaster import __version__
from loadmaster.config import Loaded
from loadmaster.core.facts import Finding
from loadmaster.core.machinereport import MachineReport, PeerCopy, PortUse
from loadmaster.core.redaction import Identity
from loadmaster.core.secrets import is_secret_name
from loadmaster.edge.environments import installed
from loadmaster.edge.gpus import GpuSpecError, read_nvml
from loadmaster.edge.host import read_host
from loadmaster.edge.libraries import copy_between_cards, read_libraries
from loadmaster.edge.ports import FOLDER_VARIABLE, holder, is_free
from loadmaster.edge.statehome import StateError, state_home
from loadmaster.edge.system import (
    container,
    device_files,
    disks,
    distribution,
    iommu,
    limits,
    numa_nodes,
    processor,
    telling_environment,
)
from loadmaster.edge.topology import read_topology
from loadmaster.render.configuration import config_text
from loadmaster.render.visible import visible_log
from loadmaster.service.enginestate import read_state
from loadmaster.service.places import Places

_TAIL_BYTES = 32 * 1024
_TAIL_LINES = 120
_WIDTH = 100


def read_machine_report(
    loaded: Loaded | None = None, model: Path | None = None, *, peer_copy: bool = True
) -> MachineReport:
    """This machine. ``loaded``: a deployment whose ports and interpreter are looked at too."""
    unread: list[str] = []
    gpus = None
    try:
        gpus = read_nvml()
    except GpuSpecError as error:
        unread.append(f"cards: {error}")
    topology = read_topology()
    interpreters = _interpreters(loaded)
    libraries = tuple(read_libraries(where, python) for where, python in interpreters.items())
    library, version = platform.libc_ver()
    system = platform.uname()
    return MachineReport(
        loadmaster=__version__,
        system=system.system,
        kernel=system.release,
        machine=system.machine,
        distribution=distribution(),
        glibc=version if library == "glibc" and version else None,
        python=platform.python_version(),
        container=container(),
        cpu=processor(),
        numa_nodes=numa_nodes(),
        host=read_host(),
        driver=topology.driver,
        cuda_driver=topology.cuda,
        device_files=device_files(),
        gpus=gpus,
        links=topology.links,
        iommu=iommu(),
        limits=limits(),
        disks=disks(_folders(model)),
        libraries=libraries,
        ports=_ports(loaded),
        environment=telling_environment(),
        peer_copy=_peer_copy(interpreters, len(gpus or ()), peer_copy),
        unread=tuple(unread),
    )


def identity(report: MachineReport) -> Identity:
    """Who asks, on which machine, and every value that is secret by its name."""
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
    with contextlib.suppress(KeyError, OSError):
        users.add(getpass.getuser())
    homes = {str(Path.home())} if os.environ.get("HOME") or users else set()
    users |= {Path(home).name for home in homes}
    hosts = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    hosts |= {name.partition(".")[0] for name in hosts}
    secrets = tuple(value for name, value in os.environ.items() if is_secret_name(name) and value)
    versions = tuple(version for libraries in report.libraries for version in libraries.versions.values())
    return Identity(tuple(users - {""}), tuple(hosts - {""}), tuple(homes), secrets, versions)


def last_findings(loaded: Loaded) -> tuple[Finding, ...]:
    """Why the deployment's engine ended the last time; empty when it runs, or ended without a finding."""
    state = read_state(Places(loaded.path.parent).engine)
    return state.findings if state is not None else ()


def deployment_sections(loaded: Loaded) -> dict[str, str]:
    """Heading → text: the configuration, what the engine's state says, the end of its log."""
    places = Places(loaded.path.parent)
    sections = {"Deployment": config_text(loaded.deployment, loaded.origins, loaded.path.name, _WIDTH)}
    for heading, path in (("State of the engine", places.engine), ("Gateway that did not open", places.web_problem)):
        with contextlib.suppress(OSError):
            sections[heading] = path.read_text(encoding="utf-8", errors="replace")
    sections["Log of the engine, its end"] = _tail(places.backend_log)
    return sections


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = visible_log(file.read().decode("utf-8", "replace")).splitlines()
    except OSError as error:
        return f"none: {error.strerror}"
    return "\n".join((lines[1:] if size > _TAIL_BYTES else lines)[-_TAIL_LINES:])


def _interpreters(loaded: Loaded | None) -> Mapping[str, str]:
    """Where → interpreter: this one, those of the installed engines, that of the deployment."""
    found = {"loadmaster's own environment": sys.executable}
    with contextlib.suppress(StateError):
        for environment in installed(state_home()):
            found[f"the environment of vLLM {environment.version}"] = str(environment.python)
    if loaded is not None and loaded.deployment.engine.python:
        found["the deployment's interpreter"] = loaded.deployment.engine.python
    return found


def _peer_copy(interpreters: Mapping[str, str], cards: int, wanted: bool) -> PeerCopy:
    if not wanted:
        return PeerCopy("not run", "it was not asked for")
    last = PeerCopy("not run", "there are not two cards")
    for python in reversed(list(interpreters.values())) if cards > 1 else ():
        last = copy_between_cards(python, cards)
        if last.status != "not run":
            return last
    return last


def _folders(model: Path | None) -> dict[str, Path]:
    cache = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    found = {"downloaded models": Path(cache).expanduser(), "temporary files": Path(os.environ.get("TMPDIR", "/tmp"))}
    with contextlib.suppress(StateError):
        found["deployments and engines"] = state_home()
    if model is not None:
        found["the model"] = model
    return found


def _ports(loaded: Loaded | None) -> tuple[PortUse, ...]:
    wanted = {7860: "the gateway, by default", 8000: "the engine, by default"}
    if loaded is not None:
        deployment = loaded.deployment
        wanted = {deployment.gateway.port: "the gateway", deployment.engine.port: "the engine"}
    return tuple(_port(port, purpose) for port, purpose in sorted(wanted.items()) if port)


def _port(port: int, purpose: str) -> PortUse:
    if is_free("127.0.0.1", port):
        return PortUse(port, purpose, None, own=False)
    found = holder(port)
    own = False
    if found is not None:
        with contextlib.suppress(OSError):
            own = f"{FOLDER_VARIABLE}=".encode() in Path(f"/proc/{found[0]}/environ").read_bytes()
    held = f"process {found[0]} {found[1]}" if found is not None else "a process that cannot be seen"
    return PortUse(port, purpose, held + (" of a deployment" if own else ""), own)
