"""The table of sharding rules: sources, expressions, and the names of published checkpoints."""

from __future__ import annotations

import re

import pytest

from loadmaster.core.architectures import family_of, place
from loadmaster.core.tables import load_toml
from loadmaster.core.tensors import synthesise
from tests.core import published
from tests.core.published import facts
from tests.core.test_shards import MODELS


def test_every_rule_and_family_names_its_source() -> None:
    table = load_toml("architectures.toml")
    for rules in table["rules"].values():
        for rule in rules:
            assert rule["source"]
            re.compile(rule["match"])
            assert rule["split"] in {
                "vocabulary",
                "rows",
                "kv_rows",
                "columns",
                "vector",
                "replicated",
                "experts",
                "skip",
            }
    for family in table["families"].values():
        assert family["source"]
        assert set(family["rules"]) | set(family.get("vision_rules", [])) <= table["rules"].keys()
        assert ("vision" in family) == ("vision_rules" in family)
    for rules in load_toml("kv-cache.toml").values():
        if isinstance(rules, list):
            assert all(rule["source"] and rule["since"] for rule in rules)


def test_an_architecture_belongs_to_one_family() -> None:
    families = load_toml("architectures.toml")["families"].values()
    names = [name for family in families for name in family["architectures"]]
    assert len(names) == len(set(names))
    assert family_of("NobodysForCausalLM").exact is False
    assert family_of(None).exact is False


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config["architectures"][0])
def test_every_tensor_of_a_known_model_has_a_rule(config: published.Config) -> None:
    model = facts(config)
    family = family_of(model.architecture)
    for group in synthesise(model):
        placement = place(family.name, model.architecture, group.name, model.quantization.method, "0.33")
        assert placement.known, group.name


@pytest.mark.parametrize(
    ("architecture", "name", "split", "part"),
    [
        ("LlamaForCausalLM", "model.layers.{l}.self_attn.rotary_emb.inv_freq", "skip", "other"),
        ("LlamaForCausalLM", "lm_head.weight", "vocabulary", "lm_head"),
        ("MixtralForCausalLM", "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight", "experts", "experts"),
        (
            "MixtralForCausalLM",
            "model.layers.{l}.block_sparse_moe.gate.weight",
            "replicated",
            "shared expert and router",
        ),
        ("Qwen3NextForCausalLM", "model.layers.{l}.linear_attn.in_proj_qkvz.weight", "rows", "linear attention"),
        (
            "Qwen3VLMoeForConditionalGeneration",
            "model.language_model.layers.{l}.mlp.experts.gate_up_proj",
            "experts",
            "experts",
        ),
        ("Qwen3_5ForConditionalGeneration", "model.visual.blocks.{l}.mlp.linear_fc2.weight", "columns", "vision"),
        ("Qwen3VLForConditionalGeneration", "model.visual.deepstack_merger_list.2.linear_fc1.weight", "rows", "vision"),
        ("Gemma3ForConditionalGeneration", "vision_tower.vision_model.head.mlp.fc1.weight", "skip", "vision"),
        (
            "Mistral3ForConditionalGeneration",
            "vision_tower.transformer.layers.{l}.attention.o_proj.weight",
            "columns",
            "vision",
        ),
        ("DeepseekV3ForCausalLM", "model.layers.{l}.self_attn.kv_b_proj.weight", "rows", "attention"),
        ("DeepseekV3ForCausalLM", "model.layers.{l}.shared_head.head.weight", "skip", "mtp"),
        ("DeepseekV3ForCausalLM", "model.layers.{l}.embed_tokens.weight", "skip", "mtp"),
    ],
)
def test_places(architecture: str, name: str, split: str, part: str) -> None:
    placement = place(family_of(architecture).name, architecture, name, None, "0.33")
    assert placement.split == split
    assert placement.part == part
