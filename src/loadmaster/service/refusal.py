"""Why a deployment is not started or stopped."""

from __future__ import annotations

from collections.abc import Sequence

from loadmaster.core.facts import Finding

PROBLEM, USAGE = 1, 2


class Refusal(Exception):
    """A start that cannot succeed. ``exit_code``: 1 a problem, 2 named wrongly. ``hint``: what to do."""

    def __init__(
        self, message: str, hint: str | None = None, exit_code: int = PROBLEM, findings: Sequence[Finding] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.findings = tuple(findings)


class SuperviseError(Exception):
    """Supervision could not be begun or ended. ``hint``: what to do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
