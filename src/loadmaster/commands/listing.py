"""loadmaster list"""

from __future__ import annotations

import sys

import click

from loadmaster.commands.deployments import config_errors
from loadmaster.commands.options import json_option
from loadmaster.failure import OK, PROBLEM
from loadmaster.terminal import write_result


@click.command(name="list")
@json_option
def list(as_json: bool) -> None:
    """The deployments side by side, and the ports that collide."""
    from loadmaster.config import ConfigError, list_deployments, load_deployment
    from loadmaster.core.ports import port_collisions
    from loadmaster.render.configuration import ListedDeployment, list_document, list_text

    listed = []
    with config_errors():
        names = list_deployments()
    for name in names:
        try:
            listed.append(ListedDeployment(name=name, deployment=load_deployment(name).deployment))
        except ConfigError as error:
            listed.append(ListedDeployment(name=name, broken=error.message))
    collisions = port_collisions([entry.deployment for entry in listed if entry.deployment is not None])
    if as_json:
        from loadmaster.render.documents import encode

        write_result(encode(list_document(listed, collisions)))
    elif listed:
        write_result(list_text(listed, collisions) + "\n")
    else:
        click.echo("no deployments yet; make one with: loadmaster init NAME --model MODEL", err=True)
    sys.exit(PROBLEM if collisions or any(entry.broken for entry in listed) else OK)
