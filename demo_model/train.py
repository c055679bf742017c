"""Training on one card, or a smoke run on a CPU: ``python -m demo_model.train --help``. Resumes from its checkpoint."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader

from demo_model.batches import NO_LABEL, Batches
from demo_model.network import SIZES, Network, made
from demo_model.world import CENTRES

_WARM_UP, _COOL_DOWN = 200, 0.45  # steps; the part of the time in which the rate falls to nothing
_DECAY = 0.05


def rate(step: int, part: float, peak: float) -> float:
    """Rises over the first steps, stays, and falls in a straight line to nothing at the end. ``part``: of the time."""
    rising = min(1.0, (step + 1) / _WARM_UP)
    falling = min(1.0, max(0.0, 1.0 - part) / _COOL_DOWN)
    return peak * rising * falling


class Masters:
    """The weights in 32 bits that the optimiser moves; the network computes with copies, on a card in 16 bits."""

    def __init__(self, network: Network, peak: float) -> None:
        self.copies = dict(network.named_parameters())
        self.weights = {name: p.detach().float().clone().requires_grad_() for name, p in self.copies.items()}
        groups = [
            {"params": [p for p in self.weights.values() if p.ndim >= 2], "weight_decay": _DECAY},
            {"params": [p for p in self.weights.values() if p.ndim < 2], "weight_decay": 0.0},
        ]
        fused = next(iter(self.weights.values())).is_cuda
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self.adam = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), eps=1e-9, fused=fused)

    def load(self, saved: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(saved["network"][name])
        if "optimiser" in saved:
            self.adam.load_state_dict(saved["optimiser"])
        self.copy()

    @torch.no_grad()
    def copy(self) -> None:
        torch._foreach_copy_(list(self.copies.values()), list(self.weights.values()))

    def step(self, now: float) -> Tensor:
        """One step at this rate from the copies' gradients; returns their norm before it is clipped."""
        gradients = [weight.grad for weight in self.weights.values()]
        torch._foreach_zero_(gradients)
        used = [(own, copy.grad) for own, copy in zip(gradients, self.copies.values()) if copy.grad is not None]
        torch._foreach_copy_([own for own, _ in used], [gradient for _, gradient in used])
        for copy in self.copies.values():
            copy.grad = None
        for group in self.adam.param_groups:
            group["lr"] = now
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        self.adam.step()
        self.copy()
        return norm


def clean(pixels: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bytes as values from -1 to 1; with a generator, a third of the pictures get grain and other lights."""
    values = pixels.float() / 127.5 - 1.0
    if generator is None:
        return values
    shape, device = (pixels.shape[0], 1, 1, 1), pixels.device

    def drawn(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, device=device)

    touched = (drawn(*shape) < 0.35).float()
    grain = torch.randn(values.shape, generator=generator, device=device) * drawn(*shape) * 0.09
    gain, shift = 1 + (drawn(*shape) - 0.5) * 0.12, (drawn(*shape) - 0.5) * 0.08
    return (values + touched * (grain + values * (gain - 1) + shift)).clamp(-1, 1)


def losses(
    network: Network, batch: dict[str, Tensor], generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of the answers, of the training-only head, and the part of answer tokens that are right."""
    slots = [name for name in batch if name.startswith("pixels")]
    kind = network.centres.weight.dtype
    pictures = [clean(batch[name], generator).to(kind) for name in slots]
    hidden, found = network(batch["numbers"], batch["places"], pictures)
    # answers are picked by their places, counted by the workers: a mask would make the card wait for its own result
    labels = batch["labels"].flatten()[batch["learned"]]
    scores = network.model.lm_head(hidden.flatten(0, 1)[batch["learned"]]).float()
    answers = F.cross_entropy(scores, labels)
    right = (scores.detach().argmax(-1) == labels).float().mean()
    centres = answers.new_zeros(())
    for slot, cells in enumerate(found):
        kinds, colours = cells.float().split([len(CENTRES) + 1, cells.shape[-1] - len(CENTRES) - 1], -1)
        marks = batch[f"centres{slot}"]
        centres = centres + F.cross_entropy(kinds.transpose(1, 2), marks[:, 0])
        named = F.cross_entropy(colours.transpose(1, 2), marks[:, 1], reduction="sum")
        centres = centres + 0.2 * named / (marks[:, 1] != NO_LABEL).sum().clamp(min=1)
    return answers, centres, right


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    network = Network(made(options.size, options.seed)).to(device)
    masters = Masters(network, options.rate)
    if device.type == "cuda":
        for weight in masters.copies.values():  # not the buffers: angles of positions stay in 32 bits
            weight.data = weight.data.bfloat16()
    step, before = 0, 0.0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        masters.load(saved)
        step, before = saved["step"], saved["minutes"]
        print(f"resumed at step {step}, after {before:.2f} minutes", flush=True)
    generator = torch.Generator(device=device)
    loader = DataLoader(
        Batches(options.seed, options.batch, step),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=4 if options.workers else None,
        pin_memory=device.type == "cuda",
    )
    begun, shown_at, shown_step, waited = time.monotonic(), time.monotonic(), step, 0.0
    sums = torch.zeros(3, device=device)
    fetched = time.monotonic()
    for batch in loader:
        waited += time.monotonic() - fetched
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        generator.manual_seed(options.seed * 1_000_003 + step)
        answers, centres, right = losses(network, batch, generator)
        (answers + options.head * centres).backward()
        minutes = (time.monotonic() - begun) / 60
        masters.step(rate(step, (before + minutes) / options.total_minutes, options.rate))
        sums += torch.stack((answers.detach(), centres.detach(), right))
        step += 1
        if step % options.every == 0:
            now = time.monotonic()
            taken = step - shown_step
            line: dict[str, Any] = {
                "step": step,
                "answers": round(sums[0].item() / taken, 4),
                "centres": round(sums[1].item() / taken, 4),
                "right": round(sums[2].item() / taken, 4),
                "steps_s": round(taken / (now - shown_at), 2),
                "waited": round(waited / (now - shown_at), 2),
                "minutes": round(before + (now - begun) / 60, 2),
            }
            if not math.isfinite(line["answers"]):
                raise SystemExit(f"step {step}: the loss is not finite")
            print(json.dumps(line), flush=True)
            sums.zero_()
            shown_at, shown_step, waited = time.monotonic(), step, 0.0
        if step == options.steps or minutes > options.minutes or before + minutes > options.total_minutes:
            break
        fetched = time.monotonic()
    minutes = before + (time.monotonic() - begun) / 60
    save(options.checkpoint, masters, step, minutes)
    print(f"saved step {step} after {minutes:.2f} minutes", flush=True)


def save(path: Path, masters: Masters, step: int, minutes: float) -> None:
    """The checkpoint, and beside it the weights alone in 16 bits, which is what leaves the machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().cpu() for name, weight in masters.weights.items()}
    for target, content in (
        (path, {"network": weights, "optimiser": masters.adam.state_dict(), "step": step, "minutes": minutes}),
        (path.with_suffix(".half"), {"network": {name: w.half() for name, w in weights.items()}, "step": step}),
    ):
        beside = target.with_suffix(".part")
        torch.save(content, beside)
        beside.replace(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="resumed from if it exists, written at the end")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    parser.add_argument("--steps", type=int, help="end there, however much time is left")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--head", type=float, default=1.5, help="weight of the training-only head's loss")
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of figures")
    parser.add_argument("--minutes", type=float, default=8.3, help="of this call; then it saves and ends")
    parser.add_argument("--total-minutes", type=float, default=16.6, help="of all calls; the rate falls with them")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
