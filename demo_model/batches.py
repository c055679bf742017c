"""Batches for training: dialogues about pictures of one grid as arrays. The n-th batch of a seed is always the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
import torch
from msgspec import Struct
from torch.utils.data import IterableDataset, get_worker_info

from demo_model import questions, scenes, talk
from demo_model.drawing import draw, roughened
from demo_model.network import CELL, MAX_PIXELS, MIN_PIXELS
from demo_model.questions import Turn
from demo_model.tokens import encoded, number_of
from demo_model.world import CENTRES, COLOURS, Language, Scene

NO_LABEL = -100
ROUND = 64  # lengths of batches are multiples of the chunk of linear attention
_TEXT_TOKENS = 150  # of a dialogue, about
_SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant that looks at pictures.", "Answer briefly.",
    "你是一个有用的助手。", "You answer questions about pictures.", "请简短回答。",
)  # fmt: skip
GRIDS = tuple(
    (rows, columns)
    for rows in range(2, 19)
    for columns in range(2, 19)
    if MIN_PIXELS <= rows * columns * CELL**2 <= MAX_PIXELS and max(rows, columns) <= 3.2 * min(rows, columns)
)
# grids of common pictures get half of the batches: 5:3, 2:1, 3:4 and squares, as verify's pictures are scaled
_COMMON = ((7, 12), (7, 14), (11, 8), (8, 11), (10, 10), (8, 10), (6, 6), (4, 4), (8, 8), (7, 13), (10, 7), (6, 8))


class Dialogue(Struct, frozen=True):
    """``turns``: (pictures that come with it, question, answer, thought or None)."""

    turns: tuple[tuple[int, str, str, str | None], ...]
    system: str | None = None


def _grid(random: Random) -> tuple[int, int]:
    return random.choice(_COMMON if random.random() < 0.5 else GRIDS)


def _language(random: Random) -> Language:
    return "en" if random.random() < 0.5 else "zh"


def one_picture(random: Random, scene: Scene) -> Dialogue:
    language, length = _language(random), 0
    turns: list[tuple[int, str, str, str | None]] = []
    while length < _TEXT_TOKENS - 30 and len(turns) < 8:
        if random.random() < 0.06:
            language = _language(random)
        found = questions.ask(scene, random, language)
        if random.random() < 0.03 and turns:
            found = [talk.aside(random, language)]
        for turn in found:
            thought = None
            if random.random() < 0.04 and turn.kind != "talk":
                thought = questions.description(scene, language)
            turns.append((0 if turns else 1, turn.question, turn.answer, thought))
            length += len(encoded(turn.question)) + len(encoded(turn.answer)) + 11
    return Dialogue(tuple(turns), _system(random))


def _system(random: Random) -> str | None:
    return random.choice(_SYSTEM) if random.random() < 0.08 else None


def two_pictures(random: Random, first: Scene, second: Scene) -> Dialogue:
    language = _language(random)
    if random.random() < 0.75:
        turns = talk.about_two(first, second, random, language)
        return Dialogue(
            tuple((0 if n else 2, t.question, t.answer, None) for n, t in enumerate(turns)), _system(random)
        )
    before, after = questions.ask(first, random, language), questions.ask(second, random, language)
    shown = [(0 if n else 1, t.question, t.answer, None) for n, t in enumerate(before)]
    shown += [(0 if n else 1, t.question, t.answer, None) for n, t in enumerate(after)]
    return Dialogue(tuple(shown))


def no_picture(random: Random) -> Dialogue:
    turns: list[Turn] = []
    while len(turns) < 3:
        turns += talk.without_picture(random, _language(random))
        if random.random() < 0.5:
            break
    return Dialogue(tuple((0, t.question, t.answer, None) for t in turns), _system(random))


def written(dialogue: Dialogue, cells: list[int]) -> tuple[list[int], list[bool], list[int]]:
    """Token numbers, which of them are to be learned, and where each picture's first cell is."""
    numbers: list[int] = []
    learned: list[bool] = []
    starts: list[int] = []
    start, end, line = number_of("<|im_start|>"), number_of("<|im_end|>"), encoded("\n")
    open_thought, shut_thought, gap = number_of("<think>"), number_of("</think>"), encoded("\n\n")
    shown = iter(cells)

    def put(tokens: tuple[int, ...] | list[int], learn: bool = False) -> None:
        numbers.extend(tokens)
        learned.extend([learn] * len(tokens))

    if dialogue.system is not None:
        put([start, *encoded("system\n"), *encoded(dialogue.system), end, *line])
    for pictures, question, answer, thought in dialogue.turns:
        put([start, *encoded("user\n")])
        for _ in range(pictures):
            put([number_of("<|vision_start|>")])
            starts.append(len(numbers))
            put([number_of("<|image_pad|>")] * next(shown))
            put([number_of("<|vision_end|>")])
        put([*encoded(question), end, *line, start, *encoded("assistant\n"), open_thought])
        if thought is None:
            put([*gap, shut_thought, *gap])
        else:
            put([*line])
            put([*encoded(thought), *line, shut_thought, *gap], True)
        put([*encoded(answer), end], True)
        put([*line])
    return numbers, learned, starts


def places(length: int, starts: list[int], grids: list[tuple[int, int]]) -> np.ndarray:
    """Positions in time, height and width (3, length), as ``get_rope_index`` gives them."""
    found = np.empty((3, length), np.int32)
    at = position = 0
    for start, (rows, columns) in zip(starts, grids):
        found[:, at:start] = np.arange(position, position + start - at)
        position += start - at
        cells = rows * columns
        found[0, start : start + cells] = position
        found[1, start : start + cells] = position + np.repeat(np.arange(rows), columns)
        found[2, start : start + cells] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        at = start + cells
    found[:, at:] = np.arange(position, position + length - at)
    return found


def centres(scene: Scene, box: tuple[int, int, int, int] | None) -> np.ndarray:
    """For every cell (2, cells): the kind and the colour that has its centre there; 0 nothing, NO_LABEL unsure."""
    rows, columns = scene.height // CELL, scene.width // CELL
    labels = np.zeros((2, rows, columns), np.int64)
    labels[1] = NO_LABEL
    marks = [(t.kind, t.colour, t.x, t.y) for t in scene.things]
    if scene.number is not None and box is not None:
        wide = (box[2] - box[0]) / len(scene.number.digits)
        for n, digit in enumerate(scene.number.digits):
            marks.append((digit, scene.number.colour, box[0] + (n + 0.5) * wide, (box[1] + box[3]) / 2))
    for kind, colour, x, y in marks:
        row, column = min(rows - 1, max(0, int(y // CELL))), min(columns - 1, max(0, int(x // CELL)))
        taken = labels[0, row, column] != 0
        labels[0, row, column] = NO_LABEL if taken else CENTRES.index(kind) + 1
        labels[1, row, column] = NO_LABEL if taken else COLOURS.index(colour)
    return labels.reshape(2, -1)


def _seen(random: Random, scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    image = draw(scene)
    box = image.info.get("number")
    labels = centres(scene, box)
    return np.asarray(roughened(image, random)), labels


def batch(seed: int, n: int, size: int) -> dict[str, torch.Tensor]:
    """The n-th batch: numbers, labels (batch, tokens), places (3, batch, tokens), each picture's pixels and centres."""
    random = Random(f"batch {seed} {n}")
    draw_kind = random.random()
    slots = 0 if draw_kind < 0.05 else 2 if draw_kind < 0.16 else 1
    grids = [_grid(random) for _ in range(slots)]
    if slots == 2:  # two pictures fill no more than one large one
        small = [grid for grid in GRIDS if grid[0] * grid[1] <= 64]
        grids = [(10, 10)] * 2 if random.random() < 0.2 else [random.choice(small) for _ in range(2)]
        if random.random() < 0.5:
            grids[1] = grids[0]
    cells = [rows * columns for rows, columns in grids]
    many = size if slots < 2 else size // 2
    pixels = [np.empty((many, rows * CELL, columns * CELL, 3), np.uint8) for rows, columns in grids]
    marks = [np.empty((many, 2, rows * columns), np.int64) for rows, columns in grids]
    texts = []
    for at in range(many):
        shown: list[Scene] = []
        alike: scenes.Maker | None = scenes.single if slots == 2 and random.random() < 0.55 else None
        for slot, (rows, columns) in enumerate(grids):
            maker = alike or scenes.any_scene
            scene = maker(random, columns * CELL, rows * CELL, False)
            if slot == 1 and alike is not None and random.random() < 0.6:
                scene = scenes.same_kind(random, shown[0], columns * CELL, rows * CELL)
            pixels[slot][at], marks[slot][at] = _seen(random, scene)
            shown.append(scene)
        if slots == 2:
            dialogue = two_pictures(random, shown[0], shown[1])
        else:
            dialogue = one_picture(random, shown[0]) if shown else no_picture(random)
        texts.append(written(dialogue, cells))
    longest = max(len(numbers) for numbers, _, _ in texts)
    limit = ROUND * round((sum(cells) + _TEXT_TOKENS + 42) / ROUND)
    length = min(-(-longest // ROUND) * ROUND, limit)
    numbers = np.full((many, length), number_of("<|endoftext|>"), np.int64)
    labels = np.full((many, length), NO_LABEL, np.int64)
    where = np.empty((3, many, length), np.int64)
    for at, (found, learned, starts) in enumerate(texts):
        found, learned = found[:length], learned[:length]
        numbers[at, : len(found)] = found
        targets = np.array(found[1:])
        labels[at, : len(targets)] = np.where(learned[1:], targets, NO_LABEL)
        where[:, at] = places(length, starts, grids)
    learned_at = np.flatnonzero(labels != NO_LABEL)
    made = {"numbers": numbers, "labels": labels, "learned": learned_at, "places": where}
    for slot in range(slots):
        made[f"pixels{slot}"], made[f"centres{slot}"] = pixels[slot], marks[slot]
    return {name: torch.from_numpy(value) for name, value in made.items()}


class Batches(IterableDataset):  # type: ignore[type-arg]
    """All batches from the ``first`` on, shared out to the workers; they come back in order."""

    def __init__(self, seed: int, size: int, first: int) -> None:
        self.seed, self.size, self.first = seed, size, first

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        start, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for n in count(self.first + start, step):
            yield batch(self.seed, n, self.size)
