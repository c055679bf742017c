"""NAME of a deployment as an argument: shells complete it from the folders that are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    _Text = click.ParamType[str]
else:
    _Text = click.ParamType  # generic from click 8.2 on


class DeploymentName(_Text):
    """Any text; what completes it comes from the state folder, with the standard library alone."""

    name = "name"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from loadmaster.edge.statehome import StateError, list_deployments

        try:
            return [CompletionItem(name) for name in list_deployments() if name.startswith(incomplete)]
        except StateError:
            return []


def deployment_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("name", type=DeploymentName())(command)
