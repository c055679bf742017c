"""Pictures that a message shows: each has to be on the shelf of who asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct

from loadmaster.core.conversation import MOST_PICTURES, PictureRef
from loadmaster.service.errors import ApiError, invalid
from loadmaster.service.shelf import Shelf

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_NAME = 200


class GivenPicture(Struct, forbid_unknown_fields=True):
    """A stored picture as a request names it, with what only the browser knows of it."""

    sha256: str
    name: str | None = None
    original_width: int | None = None
    original_height: int | None = None


Given = str | GivenPicture  # the hash alone does as well


def hashes_of(given: Sequence[Given]) -> list[str]:
    """The hashes of pictures, in order. Raises :class:`ApiError` for what is none, and for too many."""
    if len(given) > MOST_PICTURES:
        raise invalid("too_many_pictures", f"a message may have {MOST_PICTURES} pictures at most", "pictures")
    hashes = [one if isinstance(one, str) else one.sha256 for one in given]
    if any(_SHA256.fullmatch(sha256) is None for sha256 in hashes):
        raise invalid("picture_invalid", "a picture is named by its SHA-256, 64 small hexadecimal digits", "pictures")
    return hashes


def is_hash(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


async def picture_refs(
    shelf: Shelf, owner: str, given: Sequence[Given], known: Iterable[PictureRef] = ()
) -> tuple[PictureRef, ...]:
    """References to stored pictures, in order. ``known``: those whose names are kept already.

    Raises :class:`ApiError` 409 that names the pictures that have to be sent (again) first.
    """
    hashes = hashes_of(given)
    named = {picture.sha256: picture for picture in known}
    found = await shelf.pictures(owner, hashes)
    missing = [sha256 for sha256 in hashes if sha256 not in found]
    if missing:
        raise ApiError(409, "picture_missing", f"send these pictures first: {', '.join(missing)}", param="pictures")
    references = []
    for one, sha256 in zip(given, hashes):
        stored, reference = found[sha256], named.get(sha256)
        if reference is None or not isinstance(one, str):
            told = one if isinstance(one, GivenPicture) else GivenPicture(sha256)
            reference = PictureRef(
                sha256=sha256,
                width=stored.width,
                height=stored.height,
                original_width=told.original_width,
                original_height=told.original_height,
                name=told.name[:_LONGEST_NAME] if told.name else None,
            )
        references.append(reference)
    return tuple(references)
