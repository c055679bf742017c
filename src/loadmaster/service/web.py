"""The page: its files, who is logged in, and what it is told at first; each further part of its API is a module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from msgspec import Struct

import loadmaster
from loadmaster.service.errors import ApiError
from loadmaster.service.gatewaysettings import PageSettings
from loadmaster.service.modelfacts import context_tokens
from loadmaster.service.pageanswers import PageAnswers
from loadmaster.service.pageconversations import PageConversations
from loadmaster.service.pageevents import PageEvents
from loadmaster.service.pagefiles import PageFiles
from loadmaster.service.pagerequest import Desk, reply
from loadmaster.service.pagesessions import LONGEST_S, Visitor, check_own_page, cookie_name

if TYPE_CHECKING:
    from loadmaster.service.backends import Group
    from loadmaster.service.gateway import Gateway

_EXAMPLES = "examples/examples.json"


class _Login(Struct, forbid_unknown_fields=True):
    key: str


class Page:
    """Everything that a gateway serves beside the engines' API."""

    def __init__(self, gateway: Gateway, settings: PageSettings) -> None:
        self.desk = Desk(gateway, settings)
        self._gateway = gateway
        self._settings = settings
        self._files = PageFiles()
        self.conversations = PageConversations(self.desk)
        self.answers = PageAnswers(self.desk, self.conversations)
        self.events = PageEvents(self.desk)

    def attach(self, app: web.Application) -> None:
        """Add the page's routes to the gateway's application, and its house-keeping."""
        router = app.router
        router.add_get("/", self._files.index)
        router.add_get("/static/{name:.+}", self._files.file)
        router.add_get("/api/session", self.session)
        router.add_post("/api/login", self.login)
        router.add_post("/api/logout", self.logout)
        self.conversations.attach(app)
        self.answers.attach(app)
        self.events.attach(app)
        app.cleanup_ctx.append(self._running)

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        await self.desk.shelf.open()
        house = asyncio.create_task(self.desk.shelf.keep_house())
        yield
        await self.events.close()
        await self.answers.close()
        house.cancel()
        await asyncio.gather(house, return_exceptions=True)
        await self.desk.shelf.close()

    async def session(self, request: web.Request) -> web.StreamResponse:
        visitor = self.desk.known(request)
        await self.desk.shelf.look()
        told: dict[str, Any] = {
            "schema": 1,
            "version": loadmaster.__version__,
            "keys_required": self._gateway.keys is not None,
            "user": visitor.owner if visitor is not None and visitor.key is not None else None,
        }
        if visitor is None:
            return reply(told)
        return reply(told | await self._facts(visitor))

    async def _facts(self, visitor: Visitor) -> dict[str, Any]:
        shelf = self.desk.shelf
        return {
            "deployment": self._settings.deployment,
            "models": [self._model(group) for group in self._gateway.backends.groups.values()],
            "storage": "server" if shelf.keeps else "browser",
            "read_only": shelf.problem,
            "quota": {"bytes": shelf.quota, "used": await shelf.used(visitor.owner)},
            "examples": self._examples(),
        }

    def _model(self, group: Group) -> dict[str, Any]:
        """What the page has to know of a model; None: unknown, or without a limit."""
        settings, card = self._settings, group.backends[0].card
        own = group is next(iter(self._gateway.backends.groups.values()))  # the others have plans of their own
        plan = settings.plan if own else None
        images = plan.images if plan is not None else None
        side = None if images is None or not images.tokens_per_pixel else round(images.tokens_per_pixel**-0.5)
        return {
            "id": group.model,
            "up": any(backend.up for backend in group.backends),
            "context_tokens": context_tokens(card, plan),
            "max_images": settings.max_images,
            "max_pixels": settings.max_pixels,
            "patch": None if side is None else {"size": side, "merge": 1, "min_pixels": None},
            "thinking": settings.thinking if own else None,
        }

    def _examples(self) -> list[dict[str, Any]]:
        content = self._files.content(_EXAMPLES)
        if content is None:
            return []
        examples: list[dict[str, Any]] = msgspec.json.decode(content)
        return [one | {"file": f"static/{self._files.version}/examples/{one['file']}"} for one in examples]

    # ------------------------------------------------------------------------------------------ login

    async def login(self, request: web.Request) -> web.StreamResponse:
        sessions = self.desk.sessions
        asked = await self.desk.read(request, _Login, 4096)
        if sessions is None:
            raise ApiError(409, "keys_not_required", "no key is asked for here")
        check_own_page(request)
        cookie, key = sessions.login(asked.key.strip(), request.remote or "")
        response = reply({"schema": 1, "user": key.name})
        response.set_cookie(
            cookie_name(request),
            cookie,
            max_age=int(LONGEST_S),
            path="/",
            httponly=True,
            samesite="Strict",
            # behind a proxy the connection here is plain, but the browser names the origin that it sees
            secure=request.secure or request.headers.get("Origin", "").lower().startswith("https://"),
        )
        return response

    async def logout(self, request: web.Request) -> web.StreamResponse:
        name = cookie_name(request)
        cookie = request.cookies.get(name)
        if self.desk.sessions is not None and cookie:
            check_own_page(request)
            self.desk.sessions.logout(cookie)
        response = reply({"schema": 1, "user": None})
        response.del_cookie(name, path="/")
        return response
