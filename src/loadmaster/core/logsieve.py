"""The lines of a long log that may matter: most are like thousands before them, or hold no word that anybody looks for.

What differs between lines of one kind are numbers, decimal or hexadecimal, so a line that said nothing is known again
by its text without their digits. Of the others whole batches are searched at once for every text that any rule looks
for; a batch without one is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from loadmaster.core.signatures import squeezed_bytes

_DIGITS = b"0123456789abcdef"
_SHORTEST_KEY = 24  # what is left of shorter lines may be left of others too
_MOST_KEYS = 20_000
_BATCH_BYTES = 1 << 16
_CARRIED = 400
_WORD = re.compile(rb"[a-z]{4,}")
# A line that does not begin as lines do: it may be the rest of the line before.
_REST = re.compile(
    rb"^(?![(\[{]|INFO|WARN|ERROR|DEBUG|CRIT|20\d\d-\d|\d\d:\d|[A-Z][a-z][a-z] [ \d]\d |$)", re.MULTILINE
)
_FEW = 6
# Tracebacks, and levels that are worth a look.
_ALWAYS = (
    *(b'File "', b'File \\"', b"Traceback (most", b"ERROR ", b"ERROR:", b"CRITICAL ", b"FATAL "),
    *(b"Error:", b"Error\n", b"Error(", b"Exception:", b"Exception\n", b"Exit:", b"Killed\n", b"Aborted", b"SIG"),
    *(b"Segmentation fault", b"core dumped", b"terminate called", b"panicked at", b"Fatal Python"),
)


class Sieve:
    """``wordings``: texts that are compared without blanks and in lower case; ``marks``: texts as they stand.

    ``go_on``: set while what was read last may go on in the next line, whatever that is.
    """

    def __init__(self, wordings: Iterable[str], marks: Iterable[str]) -> None:
        self._wordings = _Texts(wordings, compared=True)
        self._marks = _Texts([*marks, *(mark.decode() for mark in _ALWAYS)], compared=False)
        self._dull: set[bytes] = set()
        self._carried = b""
        self.go_on = False

    def sift(self, block: bytes, lines: Sequence[bytes]) -> Iterator[list[int]]:
        """The places of the block's ``lines`` that have to be read, batch by batch."""
        keys = block.translate(None, _DIGITS).split(b"\n")[: len(lines)]
        dull = self._dull
        unseen = [place for place, key in enumerate(keys) if key not in dull]
        for batch in _batches(unseen, lines):
            yield from self._narrowed(batch, lines, keys)

    def _narrowed(self, batch: list[int], lines: Sequence[bytes], keys: Sequence[bytes]) -> Iterator[list[int]]:
        """The parts of a batch that tell something."""
        batch = [place for place in batch if keys[place] not in self._dull]  # some may have become so meanwhile
        text = b"\n".join([lines[place] for place in batch]) + b"\n"
        if not self.go_on and not self._tells(self._carried + b"\n" + text):
            for place in batch:
                self._add(keys[place])
        elif len(batch) > _FEW:
            half = len(batch) // 2
            yield from self._narrowed(batch[:half], lines, keys)
            yield from self._narrowed(batch[half:], lines, keys)
        else:
            yield batch
        self._carried = text[-_CARRIED:].partition(b"\n")[2][:-1]

    def pass_over(self, line: bytes) -> None:
        """Lines like this one said nothing."""
        self._add(line.translate(None, _DIGITS))

    def clear(self) -> None:
        """Another start has begun: what said nothing may say something now."""
        self._dull.clear()

    def _tells(self, text: bytes) -> bool:
        """Whether one of the texts is in it. A word that is broken over lines is found where lines may be rests."""
        compared = squeezed_bytes(text)
        if _REST.search(text):
            return self._marks.any_of(text) or self._wordings.any_of(compared)
        words = set(_WORD.findall(text.lower()))
        joined = b"\n".join(words)
        return self._marks.by_words(words, joined, text) or self._wordings.by_words(words, joined, compared)

    def _add(self, key: bytes) -> None:
        if len(key) < _SHORTEST_KEY:
            return
        if len(self._dull) >= _MOST_KEYS:
            self._dull.clear()
        self._dull.add(key)


class _Texts:
    """Texts to look for, by a word of each.

    ``_inner``: by a word that stands whole in the text, with all that do; ``_edge``: by one that may be part of a word.
    """

    def __init__(self, texts: Iterable[str], *, compared: bool) -> None:
        self._inner: dict[bytes, list[tuple[frozenset[bytes], bytes]]] = {}
        self._edge: dict[bytes, list[bytes]] = {}
        self._wordless: list[bytes] = []
        for text in dict.fromkeys(texts):
            plain = text.encode()
            wanted = squeezed_bytes(plain) if compared else plain
            found = list(_WORD.finditer(plain.lower()))
            inner = [word[0] for word in found if word.start() > 0 and word.end() < len(plain)]
            if inner:
                self._inner.setdefault(max(inner, key=len), []).append((frozenset(inner), wanted))
            elif found:
                self._edge.setdefault(max((word[0] for word in found), key=len), []).append(wanted)
            else:
                self._wordless.append(wanted)
        self._all = [wanted for entries in self._inner.values() for _, wanted in entries]
        self._all += [wanted for entries in self._edge.values() for wanted in entries] + self._wordless

    def any_of(self, text: bytes) -> bool:
        return any(wanted in text for wanted in self._all)

    def by_words(self, words: set[bytes], joined: bytes, text: bytes) -> bool:
        """``words``: of the text, in lower case; ``joined``: the same in one."""
        if any(wanted in text for wanted in self._wordless):
            return True
        for word in self._inner.keys() & words:
            if any(needed <= words and wanted in text for needed, wanted in self._inner[word]):
                return True
        return any(wanted in text for word in self._edge if word in joined for wanted in self._edge[word])


def _batches(places: Sequence[int], lines: Sequence[bytes]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for place in places:
        batch.append(place)
        size += len(lines[place])
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
