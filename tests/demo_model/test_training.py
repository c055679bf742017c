"""Training on a CPU, in small: the fast pass is transformers' own, a few steps learn, and the export is whole.

Needs torch, transformers and numpy, which the project does not depend on; without them these tests are skipped.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from loadmaster.edge.gguf import read_gguf

NEEDED = "training's packages are not installed"
torch = pytest.importorskip("torch", reason=NEEDED)
pytest.importorskip("transformers", reason=NEEDED)
pytest.importorskip("numpy", reason=NEEDED)
pytestmark = pytest.mark.filterwarnings("ignore")


def options(checkpoint: Path, **changes: Any) -> argparse.Namespace:
    values = {
        "checkpoint": checkpoint, "size": "smoke", "steps": 4, "batch": 4, "rate": 1e-3, "head": 1.5, "seed": 35,
        "workers": 0, "every": 2, "minutes": 5.0, "total_minutes": 10.0,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def test_the_fast_pass_is_transformers_own() -> None:
    from PIL import Image
    from transformers import Qwen2VLImageProcessorPil

    from demo_model import batches, network
    from demo_model.train import clean

    net = network.Network(network.made("smoke", 1))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight * 3 if weight.ndim >= 2 else weight + torch.randn_like(weight) * 0.1)
    batch = next(found for n in range(80) if "pixels1" in (found := batches.batch(3, n, 4)))
    slots = [name for name in batch if name.startswith("pixels")]
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 1024, "longest_edge": network.MAX_PIXELS},
    )  # fmt: skip
    shown = [Image.fromarray(batch[name][n].numpy()) for n in range(len(batch["numbers"])) for name in slots]
    seen = processor(images=shown, return_tensors="pt")
    numbers = batch["numbers"]
    pictures = (numbers == net.model.config.image_token_id).int()
    with torch.no_grad():
        hidden, _ = net(numbers, batch["places"], [clean(batch[name], None) for name in slots])
        mine = net.model.lm_head(hidden)
        theirs = net.model(
            input_ids=numbers,
            attention_mask=torch.ones_like(numbers),
            mm_token_type_ids=pictures,
            pixel_values=seen["pixel_values"],
            image_grid_thw=seen["image_grid_thw"],
        ).logits
    assert (mine - theirs).abs().max() < 1e-3
    places, _ = net.model.model.get_rope_index(numbers, pictures, seen["image_grid_thw"])
    assert bool((places == batch["places"]).all())


def test_steps_are_kept_and_gone_on_from_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from demo_model import export, train

    checkpoint = tmp_path / "demo.pt"
    train.train(options(checkpoint))
    train.train(options(checkpoint, steps=6))
    assert "resumed at step 4" in capsys.readouterr().out
    network = export.loaded(tmp_path / "demo.half", "smoke")
    facts = read_gguf(*export.write_ggufs(network, tmp_path / "out"))
    assert facts.findings == ()
    assert facts.vision is not None
    assert facts.text.layer_types == ("linear_attention",) * 3 + ("full_attention",)


def test_a_handful_of_pictures_is_learned() -> None:
    from demo_model import batches, network, train

    net = network.Network(network.made("smoke", 1))
    masters = train.Masters(net, 2e-3)
    batch = batches.batch(3, 4, 4)
    for step in range(40):
        answers, centres, right = train.losses(net, batch, None)
        (answers + centres).backward()
        masters.step(2e-3)
        if step == 0:
            first = answers.item()
    assert answers.item() < 0.4 * first
    assert right.item() > 0.9
