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

_WARM_UP, _COOL_DOWN = 200, 0.4  # steps; the part of all steps in which the rate falls to nothing
_DECAY = 0.05


def rate(step: int, steps: int, peak: float) -> float:
    """Rises, stays, and falls in a straight line to nothing over the last part."""
    rising = min(1.0, (step + 1) / _WARM_UP)
    falling = min(1.0, (steps - step) / max(1, _COOL_DOWN * steps))
    return peak * rising * falling


def optimiser(network: Network, peak: float, fused: bool) -> torch.optim.AdamW:
    matrices = [p for p in network.parameters() if p.ndim >= 2]
    others = [p for p in network.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), eps=1e-9, fused=fused)


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
    pictures = [clean(batch[name], generator) for name in slots]
    hidden, found = network(batch["numbers"], batch["places"], pictures)
    wanted = batch["labels"] != NO_LABEL
    labels = batch["labels"][wanted]
    scores = network.model.lm_head(hidden[wanted]).float()
    answers = F.cross_entropy(scores, labels)
    right = (scores.argmax(-1) == labels).float().mean()
    centres = answers.new_zeros(())
    for slot, cells in enumerate(found):
        kinds, colours = cells.float().split([len(CENTRES) + 1, cells.shape[-1] - len(CENTRES) - 1], -1)
        marks = batch[f"centres{slot}"]
        centres = centres + F.cross_entropy(kinds.transpose(1, 2), marks[:, 0])
        if (marks[:, 1] != NO_LABEL).any():
            centres = centres + 0.2 * F.cross_entropy(colours.transpose(1, 2), marks[:, 1])
    return answers, centres, right


def train(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    network = Network(made(options.size, options.seed), options.compile).to(device)
    steps: int = options.steps
    adam = optimiser(network, options.rate, device.type == "cuda")
    step = 0
    if options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        network.load_state_dict(saved["network"])
        adam.load_state_dict(saved["optimiser"])
        step = saved["step"]
        print(f"resumed at step {step}", flush=True)
    generator = torch.Generator(device=device)
    loader = DataLoader(
        Batches(options.seed, options.batch, step, steps),
        batch_size=None,
        num_workers=options.workers,
        prefetch_factor=4 if options.workers else None,
        pin_memory=device.type == "cuda",
    )
    begun, shown_at, shown_step, waited = time.monotonic(), time.monotonic(), step, 0.0
    sums = torch.zeros(3, device=device)
    network.train()
    fetched = time.monotonic()
    for batch in loader:
        waited += time.monotonic() - fetched
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        generator.manual_seed(options.seed * 1_000_003 + step)
        for group in adam.param_groups:
            group["lr"] = rate(step, steps, options.rate)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            answers, centres, right = losses(network, batch, generator)
        adam.zero_grad(set_to_none=True)
        (answers + options.head * centres).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if options.device_check and not torch.isfinite(norm):
            raise SystemExit(f"step {step}: the gradient is not finite")
        adam.step()
        sums += torch.stack((answers.detach(), centres.detach(), right))
        step += 1
        if step % options.every == 0 or step == steps:
            now = time.monotonic()
            taken = step - shown_step
            line: dict[str, Any] = {
                "step": step,
                "answers": round(sums[0].item() / taken, 4),
                "centres": round(sums[1].item() / taken, 4),
                "right": round(sums[2].item() / taken, 4),
                "steps_s": round(taken / (now - shown_at), 2),
                "waited": round(waited / (now - shown_at), 2),
                "minutes": round((now - begun) / 60, 2),
            }
            if not math.isfinite(line["answers"]):
                raise SystemExit(f"step {step}: the loss is not finite")
            print(json.dumps(line), flush=True)
            sums.zero_()
            shown_at, shown_step, waited = time.monotonic(), step, 0.0
        if time.monotonic() - begun > options.minutes * 60:
            break
        fetched = time.monotonic()
    save(options.checkpoint, network, adam, step)
    print(f"saved step {step} of {steps} after {(time.monotonic() - begun) / 60:.2f} minutes", flush=True)


def save(path: Path, network: Network, adam: torch.optim.AdamW, step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    torch.save({"network": network.state_dict(), "optimiser": adam.state_dict(), "step": step}, beside)
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="resumed from if it exists, written at the end")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    parser.add_argument("--steps", type=int, required=True, help="of the whole training, also across calls")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--head", type=float, default=0.5, help="weight of the training-only head's loss")
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of figures")
    parser.add_argument("--minutes", type=float, default=8.5, help="of this call; then it saves and ends")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device-check", action="store_true", help="look at the gradient of every step")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
