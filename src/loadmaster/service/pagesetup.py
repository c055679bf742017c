"""What the page of a deployment is told: where it keeps conversations, and what the plan says of pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from loadmaster.core.deployment import Deployment
from loadmaster.core.facts import LoadSheet
from loadmaster.core.verification import Report, Step
from loadmaster.service.enginestate import read_state
from loadmaster.service.gatewaysettings import PageSettings
from loadmaster.service.imagepool import ImagePool, Outcome
from loadmaster.service.images import ImageRules
from loadmaster.service.places import Places
from loadmaster.service.runrecorder import store_path

_DAY_S = 24 * 3600.0
_PROOF_TIMEOUT_S = 120.0
_SWITCH = "enable_thinking"
_MOST_TEMPLATE_BYTES = 16 << 20


def page_settings(
    deployment: Deployment,
    places: Places,
    plan: LoadSheet | None,
    rules: ImageRules,
    pool: ImagePool,
    own_key: str | None,
) -> PageSettings | None:
    """None: the deployment wants no page. ``own_key``: with which the checklist asks a gateway that wants keys."""
    page = deployment.page
    if page.storage == "off":
        return None

    async def look_at(content: bytes) -> Outcome:
        return await pool.convert_bytes(content, rules)

    return PageSettings(
        deployment=deployment.name,
        database=str(places.conversations) if page.storage == "server" else None,
        quota_bytes=page.quota_bytes,
        retention_s=None if page.retention_days is None else page.retention_days * _DAY_S,
        look_at=look_at,
        max_images=rules.max_images,
        max_pixels=rules.max_pixels,
        thinking=knows_switch(Path(deployment.model)),
        plan=plan,
        log=str(places.backend_log),
        engine_state=str(places.engine),
        runs=str(store_path(places)),
        prove=_proof(deployment, places, plan, own_key),
    )


def _proof(
    deployment: Deployment, places: Places, plan: LoadSheet | None, own_key: str | None
) -> Callable[[Callable[[Step], None]], Awaitable[Report]]:
    async def prove(progress: Callable[[Step], None]) -> Report:
        from loadmaster.service.verify import planned_limits, verify
        from loadmaster.service.verifylocal import Installation

        state = read_state(places.engine)
        installation = Installation(
            deployment=deployment,
            plan=plan,
            log=places.backend_log,
            engine_pid=state.pid if state is not None else None,
            engine_url=f"http://127.0.0.1:{state.port}" if state is not None and state.port is not None else None,
        )
        address = msgspec.json.decode(places.web.read_bytes())["url"]
        return await verify(
            address,
            api_key=own_key,
            limits=planned_limits(installation),
            installation=installation,
            timeout_s=_PROOF_TIMEOUT_S,
            progress=progress,
        )

    return prove


def knows_switch(model: Path) -> bool | None:
    """Whether the chat template of a model folder has the switch for thinking; None: there is none to look into."""
    found = None
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        with contextlib.suppress(OSError, ValueError):
            path = model / name
            if path.stat().st_size > _MOST_TEMPLATE_BYTES:
                continue
            text = path.read_text(encoding="utf-8")
            if _SWITCH in text:
                return True
            found = found if "chat_template" not in text and name == "tokenizer_config.json" else False
    return found
