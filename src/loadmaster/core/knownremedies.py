"""What is known to help against a cause without any computing: ``data/known-remedies.toml``, else the catalogue."""

from __future__ import annotations

from functools import cache

from msgspec import Struct, convert

from loadmaster.core.facts import EngineFacts, Fix, LaunchArgs
from loadmaster.core.flagtable import flag_table
from loadmaster.core.tables import load_toml


class KnownRemedy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry; the fields are described in the file."""

    code: str
    why: str
    source: str
    argv: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    env: dict[str, str] = {}
    command: str | None = None


@cache
def entries() -> tuple[KnownRemedy, ...]:
    """The whole table, in the order of the file."""
    return convert(load_toml("known-remedies.toml")["remedy"], tuple[KnownRemedy, ...])


def known_remedies(code: str, launch: LaunchArgs, engine: EngineFacts) -> tuple[Fix, ...]:
    """Of an unknown code none; of the others at least what the catalogue advises, with its source."""
    fixes = [_fix(entry) for entry in entries() if entry.code == code and _applies(entry, launch, engine)]
    if fixes:
        return tuple(fixes)
    entry = load_toml("findings.toml").get(code)
    return (Fix(f"{entry['remedy']} (known from: {entry['source']})"),) if entry is not None else ()


def _applies(entry: KnownRemedy, launch: LaunchArgs, engine: EngineFacts) -> bool:
    if entry.argv and (engine.name != "vllm" or entry.argv[0] not in flag_table(engine.version).options):
        return False
    if entry.argv and launch.flags.get(entry.argv[0]) in (True, *entry.argv[1:]):
        return False  # the launch has it already
    return not entry.remove or any(flag in launch.flags for flag in entry.remove)


def _fix(entry: KnownRemedy) -> Fix:
    return Fix(
        f"{entry.why} (known from: {entry.source})",
        argv=entry.argv,
        remove=entry.remove,
        env=dict(entry.env),
        command=entry.command,
    )
