"""The engine of a deployment, from the environment that was installed for it."""

from __future__ import annotations

from loadmaster.core.deployment import Deployment
from loadmaster.edge.environments import python_for
from loadmaster.edge.statehome import state_home
from loadmaster.engines.base import Engine, engine_for


def engine_of(deployment: Deployment) -> Engine:
    """A new engine, for one run."""
    section = deployment.engine
    if section.kind != "vllm" or section.python is not None or section.container is not None:
        return engine_for(deployment)
    python = python_for(state_home(), section.version)
    return engine_for(deployment, python=str(python) if python is not None else None)
