"""Weights that every rank holds after loading.

The tensors of the file headers (or, without files, those computed from the configuration) are spread over
pipeline stages and tensor ranks by the rules of data/architectures.toml. Sources: vLLM 0.17 to 0.33,
model_executor/models, layers/linear.py, layers/vocab_parallel_embedding.py, layers/fused_moe, layers/quantization.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict

from msgspec import Struct, structs

from loadmaster.core.architectures import Family, Placement, family_of, online_bytes_per_parameter, place
from loadmaster.core.declaredweights import declared_weights
from loadmaster.core.engineversion import at_least
from loadmaster.core.facts import Amount, Basis, ModelFacts, RankWeights, Settings, TensorGroup
from loadmaster.core.loadblocks import SPLIT_LIMIT, allocated_bytes
from loadmaster.core.pipeline import stage_layers
from loadmaster.core.ropecache import rope_cache_bytes
from loadmaster.core.tensorlayout import FLOAT_BYTES, MODEL_DTYPE_BYTES, Sharding, tensor_bytes, up
from loadmaster.core.tensors import synthesise

_DECODER_LAYERS = re.compile(r"^(model\.|language_model\.|transformer\.)*(layers|h)\.\{l\}\.")
# bitsandbytes, 64 weights a scale: 4-bit codes with 8-bit scales, against 32-bit ones
_SCALES_AS_STORED = (0.5 + 1 / 64) / (0.5 + 4 / 64)
_WITHOUT_DRAFT_MODEL = ("ngram", "suffix", "custom_class")
_LANGUAGE, _VISION, _OTHER = "weights.language", "weights.vision", "weights.other"


class _Stage(Struct, frozen=True):
    """One pipeline stage: its decoder layers, and whether it is the first or the last."""

    layers: range
    first: bool
    last: bool


class _Sums(Struct):
    """Running bytes of one rank. ``low`` and ``high`` only differ where no rule is known."""

    parts: dict[tuple[str, str], float]
    low: dict[str, float]
    high: dict[str, float]
    decoder: float = 0.0  # of the decoder layers, which CPU offload can move
    parameters: dict[tuple[str, str, str], _Parameter] = {}


class _Parameter(Struct):
    """One parameter of the loaded model, merged from its stored tensors: ``bytes`` in each of ``layers`` layers."""

    bytes: float = 0.0
    layers: int = 0
    repacked_from: float = 0.0  # bytes before repacking or quantising while loading; 0 when it is kept as loaded


def shard_weights(model: ModelFacts, settings: Settings) -> tuple[RankWeights, ...]:
    """Bytes per component of every rank of one data-parallel replica.

    Ordered by pipeline rank, then tensor rank. ``basis`` is "read" for tensors from file headers, "computed"
    for those derived from a configuration, "assumed" with bounds where the architecture has no rule.
    A model whose tensors are unknown gives what its declared size lets assume, else ranks without components, and
    a note that says so; ``known`` is then False.
    """
    family = family_of(model.architecture)
    tensors = model.tensors or synthesise(model)
    basis: Basis = "read" if model.tensors and model.format in ("safetensors", "gguf") else "computed"
    stages, note = _stages(model, settings, tensors)
    notes = _notes(model, settings, family, tensors) + ((note,) if note else ())
    ranks = settings.tensor_parallel_size
    plan = _Plan(model, settings, family, tensors)
    known = _known(model, settings, family, tensors)
    result: list[RankWeights] = []
    for pipeline_rank, stage in enumerate(stages):
        memo: dict[Sharding, RankWeights] = {}
        for tensor_rank in range(ranks):
            sharding = plan.sharding(tensor_rank)
            if sharding not in memo:
                sums = plan.stage_sums(stage, sharding)
                rank = _rank_weights(sums, plan, basis if tensors else "assumed", notes, pipeline_rank)
                memo[sharding] = structs.replace(rank, known=known)
            result.append(structs.replace(memo[sharding], tensor_rank=tensor_rank))
    return tuple(result)


def _stages(
    model: ModelFacts, settings: Settings, tensors: tuple[TensorGroup, ...]
) -> tuple[tuple[_Stage, ...], str | None]:
    layers = model.text.num_hidden_layers or 1 + max(
        (max(group.layers) for group in tensors if group.layers), default=0
    )
    ranges, note = stage_layers(layers, settings)
    last = len(ranges) - 1
    return tuple(_Stage(span, index == 0, index == last) for index, span in enumerate(ranges)), note


def _notes(model: ModelFacts, settings: Settings, family: Family, tensors: tuple[TensorGroup, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    if tensors and not _known(model, settings, family, tensors):
        notes.append("The size of the vision tower is unknown: the table of public models does not have it.")
    if not tensors and model.weight_bytes:
        notes.append("No tensor headers: the size of the checkpoint is divided over the ranks, with wide bounds.")
    elif not tensors:
        notes.append("The size of the weights is unknown: no tensor headers, and no rule to compute them from.")
    elif not family.exact:
        notes.append(
            f"No sharding rule for the architecture {model.architecture or '(not named)'}: matrices are taken as "
            "divided over the ranks, vectors as whole, with wide bounds."
        )
    method = settings.speculative_method or ""
    if method.endswith("mtp") and tensors and not any(_is_head(group, model, family) for group in tensors):
        notes.append("The checkpoint has no prediction head for the speculative decoding that is asked for.")
    elif method and not method.endswith("mtp") and method not in _WITHOUT_DRAFT_MODEL:
        notes.append(f"The weights of the draft model ({method}) are not counted.")
    if settings.cpu_offload_bytes:
        notes.append("The decoder layers that --cpu-offload-gb moves to host memory are left out.")
    return tuple(notes)


def _known(model: ModelFacts, settings: Settings, family: Family, tensors: tuple[TensorGroup, ...]) -> bool:
    """Whether the size of all weights is known: from tensors, or at least in sum."""
    if not tensors:
        return bool(model.weight_bytes)
    no_tower = not model.tensors and family.vision is not None and model.vision is None
    return not no_tower or settings.language_model_only


def _activation_order(model: ModelFacts) -> bool:
    """GPTQ's ``desc_act``, or the ``actorder: group`` of compressed-tensors."""
    groups = (model.quantization.declared or {}).get("config_groups")
    weights = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    return bool(model.quantization.desc_act) or any(
        isinstance(one, dict) and one.get("actorder") == "group" for one in weights
    )


def _is_head(group: TensorGroup, model: ModelFacts, family: Family) -> bool:
    if family.mtp is not None and family.mtp.search(group.name):
        return True
    last = model.text.num_hidden_layers
    return last is not None and group.layers is not None and any(layer >= last for layer in group.layers)


class _Plan:
    """All that is the same for every rank: placements, dtypes, and what of the checkpoint is loaded."""

    def __init__(self, model: ModelFacts, settings: Settings, family: Family, tensors: tuple[TensorGroup, ...]) -> None:
        self.model, self.settings, self.family, self.text = model, settings, family, model.text
        declared = model.quantization.method
        self.method = declared or settings.quantization
        self.model_bytes = MODEL_DTYPE_BYTES.get(settings.dtype, 2)
        online = online_bytes_per_parameter(settings.quantization) if declared is None else None
        self.online: float | None = online[0] if online is not None else None
        self.online_experts_only = online is not None and online[1]
        self.activation_order = _activation_order(model)
        self.assumed_scales = self.method == "bitsandbytes"
        self.speculates = (settings.speculative_method or "").endswith("mtp") and settings.num_speculative_tokens > 0
        self.tower = self._loads_tower()
        # config/parallel.py: use_sequence_parallel_moe, under which shared experts are not divided
        self.whole_shared_experts = (
            settings.expert_parallel and settings.tensor_parallel_size > 1 and settings.data_parallel_size > 1
        )
        self.tied = self._tied(tensors)
        # tensors beyond the last decoder layer belong to a prediction head
        beyond = family.get("mtp_beyond_last_layer") or not family.exact
        self.last_layer = model.text.num_hidden_layers if beyond else None
        self.groups: list[tuple[TensorGroup, Placement]] = []
        self.embedding: tuple[TensorGroup, Placement] | None = None
        has_head = False
        for group in tensors:
            placement = place(family.name, model.architecture, group.name, self.method, settings.version)
            if placement.split == "skip" or (placement.component == _VISION and not self.tower):
                continue
            if placement.part == "mtp" and not self.speculates:
                continue
            if placement.part == "embeddings" and placement.leaf.kind == "data":
                self.embedding = (group, placement)
            if placement.part == "lm_head" and group.layers is None:
                if self.tied:
                    continue
                has_head = True
            if self.whole_shared_experts and placement.part == "shared expert and router":
                placement = structs.replace(placement, split="replicated")
            if not placement.known and len(group.shape) > 1:
                placement = structs.replace(placement, split="matrix" if not family.exact else "replicated")
            self.groups.append((group, placement))
        self.missing_head = bool(tensors) and not has_head and not self.tied
        self.exact = family.exact and bool(tensors)
        self.declared = None if tensors or model.weight_bytes else declared_weights(model)

    def _loads_tower(self) -> bool:
        settings, modalities = self.settings, self.family.get("modalities", ())
        limits = {"image": settings.image_limit, "video": settings.video_limit}
        if settings.language_model_only:
            return False
        return not modalities or any(limits[name] != 0 for name in modalities)

    def _tied(self, tensors: tuple[TensorGroup, ...]) -> bool:
        if self.text.tie_word_embeddings is not None:
            return self.text.tie_word_embeddings
        return not any("lm_head." in group.name for group in tensors)

    def sharding(self, tensor_rank: int) -> Sharding:
        settings, quantization = self.settings, self.model.quantization
        expert_ranks = settings.tensor_parallel_size * settings.data_parallel_size
        experts = self.text.num_experts
        local = None
        if settings.expert_parallel and experts and expert_ranks > 1:
            # fused_moe/expert_map_manager.py: the first ranks take one more when it does not divide
            local = experts // expert_ranks + (1 if tensor_rank < experts % expert_ranks else 0)
        integers = quantization.format in ("pack-quantized", "marlin-24") or (quantization.bits or 16) < 8
        capability = settings.compute_capability
        return Sharding(
            tensor_parallel=settings.tensor_parallel_size,
            expert_ranks=expert_ranks,
            local_experts=local,
            experts=experts,
            kv_heads=self.text.num_key_value_heads,
            model_bytes=self.model_bytes,
            scale_dtype_bytes=self.model_bytes if integers else 4,
            online_bytes=self.online,
            online_experts_only=self.online_experts_only,
            weight_only_fp8=capability is not None and capability < (8, 9),
            swizzled_scales=capability is not None and capability >= (10, 0),
            fp8_block_rows=quantization.block_shape[0] if quantization.block_shape else 128,
            activation_order=self.activation_order,
        )

    def stage_sums(self, stage: _Stage, sharding: Sharding) -> _Sums:
        sums = _Sums(defaultdict(float), defaultdict(float), defaultdict(float), parameters=defaultdict(_Parameter))
        tower_whole = self.settings.mm_encoder_tp_mode == "data" and self.family.get("encoder_data", False)
        for group, placement in self.groups:
            in_decoder, in_head = self._counts(group, placement, stage)
            if not in_decoder and not in_head:
                continue
            whole = placement.component == _VISION and tower_whole
            here = structs.replace(placement, split="replicated") if whole else placement
            matrix = here.split == "matrix"
            size: float = self._divided_matrix(group, sharding) if matrix else tensor_bytes(group, here, sharding)
            if not size:
                continue
            if placement.absorbed and group.dtype not in FLOAT_BYTES and placement.leaf.kind == "data":
                size += self._absorbed_bytes(sharding)
            sums.parts[placement.component, placement.part] += size * in_decoder
            sums.parts[_OTHER, "mtp"] += size * in_head
            if not self.exact:
                self._add_bounds(sums, group, here, sharding, size, in_decoder + in_head)
            if group.layers is not None and placement.component == _LANGUAGE:
                sums.decoder += size * in_decoder
            self._add_parameter(sums, group, here, size, in_decoder + in_head)
        stages = self.settings.pipeline_parallel_size
        if not self.groups and self.model.weight_bytes:
            sums.parts[_LANGUAGE, "other"] = self.model.weight_bytes / (sharding.tensor_parallel * stages)
            sums.low[_LANGUAGE] = 0.0  # parts of the checkpoint may not be loaded
            sums.high[_LANGUAGE] = self.model.weight_bytes / stages
        elif not self.groups and self.declared is not None:
            share = sharding.tensor_parallel * stages
            sums.parts[_LANGUAGE, "other"] = self.declared.bytes / share
            sums.low[_LANGUAGE] = max(0.0, self.declared.low / share - self.settings.cpu_offload_bytes)
            sums.decoder = self.declared.bytes / share
            sums.high[_LANGUAGE] = self.declared.high / stages
        if self.groups:
            self._add_derived(sums, stage, sharding)
        return sums

    def _counts(self, group: TensorGroup, placement: Placement, stage: _Stage) -> tuple[int, int]:
        """How many tensors of the group this stage has: in the decoder or tower, and in the prediction head."""
        if placement.component == _VISION:
            return (group.count if self._tower_on(stage) else 0), 0
        if placement.part == "mtp":
            return (group.count if stage.last else 0), 0
        if group.layers is None:
            if placement.part == "embeddings":
                return (group.count if self._has_embedding(stage) else 0), 0
            return (group.count if stage.last else 0), 0
        last = self.last_layer if _DECODER_LAYERS.match(group.name) else None
        in_head = 0
        if last is not None and stage.last and self.speculates:
            in_head = sum(count for layer, count in group.layers.items() if layer >= last)
        if last is None and len(stage.layers) >= len(group.layers) and stage.first and stage.last:
            return group.count, in_head
        layers = group.layers
        if len(layers) <= len(stage.layers):
            return sum(count for layer, count in layers.items() if layer in stage.layers), in_head
        return sum(layers.get(layer, 0) for layer in stage.layers), in_head

    def _has_embedding(self, stage: _Stage) -> bool:
        on = self.family.get("embeddings_on", "ends")
        return stage.first or on == "all" or (on == "ends" and stage.last and self.tied)

    def _divided_matrix(self, group: TensorGroup, sharding: Sharding) -> int:
        ranks = sharding.tensor_parallel
        divides = any(size % ranks == 0 for size in group.shape[-2:])
        return up(group.nbytes, ranks) if divides else group.nbytes

    def _absorbed_bytes(self, sharding: Sharding) -> int:
        text = self.text
        heads = up(text.num_attention_heads or 0, sharding.tensor_parallel)
        width = (text.qk_nope_head_dim or 0) + (text.v_head_dim or 0)
        return (text.kv_lora_rank or 0) * heads * width * self.model_bytes

    def _add_bounds(
        self, sums: _Sums, group: TensorGroup, placement: Placement, sharding: Sharding, size: float, count: int
    ) -> None:
        """Without a rule: at least an even share of the tensor, at most all of it but for experts and vocabulary.
        A tensor whose name no rule knows may not be loaded at all."""
        one = structs.replace(sharding, tensor_parallel=1, expert_ranks=1, local_experts=None)
        whole = float(group.nbytes) if placement.split == "matrix" else tensor_bytes(group, placement, one)
        divided = placement.split in ("experts", "vocabulary")
        if placement.known:
            sums.low[placement.component] += min(size, whole / sharding.tensor_parallel) * count
        sums.high[placement.component] += (size if divided else max(size, whole)) * count

    def _add_parameter(self, sums: _Sums, group: TensorGroup, placement: Placement, size: float, count: int) -> None:
        """Stored tensors that the engine keeps as one parameter (q, k and v; gate and up; all experts of a layer)."""
        key = (placement.component, _merged_module(placement.module), placement.leaf.kind)
        layers = len(group.layers) if group.layers else 1
        per_layer = group.count / layers
        parameter = sums.parameters[key]
        parameter.bytes += size * per_layer
        parameter.layers = max(parameter.layers, round(count / per_layer))
        if placement.leaf.kind != "data" or not placement.linear:
            return
        if group.dtype not in FLOAT_BYTES:
            parameter.repacked_from += size * per_layer
        elif self.online is not None and (placement.split == "experts" or not self.online_experts_only):
            parameter.repacked_from += size * per_layer * self.model_bytes / self.online

    def _add_derived(self, sums: _Sums, stage: _Stage, sharding: Sharding) -> None:
        """What is on the card beside the checkpoint's own tensors: an untied head that the files lack, rope
        tables, the deepstack buffer, LoRA slots."""
        if self.missing_head and stage.last and self.embedding is not None:
            group, placement = self.embedding
            size = tensor_bytes(group, placement, sharding)
            sums.parts[_LANGUAGE, "lm_head"] += size
            if not self.exact:
                sums.high[_LANGUAGE] += size
        pipelined = self.settings.pipeline_parallel_size > 1
        if self.speculates and pipelined and stage.last and self.embedding and not self._has_embedding(stage):
            sums.parts[_OTHER, "mtp"] += tensor_bytes(*self.embedding, sharding)
        rope = rope_cache_bytes(self.text, self.family, self.settings, self.model_bytes)
        if rope:
            sums.parts[_OTHER, "rope caches"] += rope
            if not self.exact:
                sums.high[_OTHER] += rope
        vision = self.model.vision
        if self.family.get("deepstack_buffer") and vision is not None and self._tower_on(stage):
            width = self.text.hidden_size or 0
            rows = self.settings.max_num_batched_tokens
            sums.parts[_OTHER, "deepstack buffer"] += len(vision.deepstack_layers) * rows * width * self.model_bytes
        if self.settings.enable_lora:
            slots = self._lora_bytes(stage, sharding)
            sums.parts[_OTHER, "lora slots"] += slots

    def _tower_on(self, stage: _Stage) -> bool:
        """From 0.33 on, encoders run on the first stage only."""
        return self.tower and (stage.first or not at_least(self.settings.version, "0.33"))

    def _lora_bytes(self, stage: _Stage, sharding: Sharding) -> int:
        """Slots for adapters on every linear layer of the decoder: the down matrix whole for column-parallel
        layers, the up matrix whole for row-parallel ones. lora/layers/column_parallel_linear.py."""
        rank, total = self.settings.max_lora_rank * self.settings.max_loras, 0
        for group, placement in self.groups:
            if placement.component != _LANGUAGE or not placement.linear or placement.leaf.kind != "data":
                continue
            if len(group.shape) != 2 or placement.split == "experts":
                continue
            parameters = _out_in(group, placement)
            ranks = sharding.tensor_parallel
            inputs = up(parameters[1], ranks) if placement.split == "columns" else parameters[1]
            outputs = up(parameters[0], ranks) if placement.split in ("rows", "kv_rows") else parameters[0]
            total += self._counts(group, placement, stage)[0] * rank * (inputs + outputs) * self.model_bytes
        return total


def _out_in(group: TensorGroup, placement: Placement) -> tuple[int, int]:
    """Output and input size of a linear layer, unpacking eight 4-bit codes a word."""
    first, second = group.shape
    packed = 8 if group.dtype == "I32" else 1
    if placement.leaf.axes == "io":
        return second * packed, first
    return first, second * packed


_MERGED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_a", "in_proj_b"), "in_proj_ba"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a"),
}


def _merged_module(module: str) -> str:
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_MERGED.get(last, last)}"


def _allocator_rounding(sums: _Sums, plan: _Plan) -> int:
    """Bytes of the allocator's blocks beyond the parameters in them. Modules are built tower first, then the
    embedding, the layers one by one, and the head."""
    if plan.settings.expandable_segments:  # blocks are cut to the byte
        return 0
    order = {_VISION: 0, _LANGUAGE: 1, _OTHER: 2}
    sizes: list[int] = []
    for component in sorted(order, key=order.__getitem__):
        own = [parameter for key, parameter in sums.parameters.items() if key[0] == component and parameter.layers]
        for layer in range(max((parameter.layers for parameter in own), default=0)):
            sizes += [math.ceil(parameter.bytes) for parameter in own if layer < parameter.layers]
    limit = SPLIT_LIMIT if at_least(plan.settings.version, "0.21") else None
    return allocated_bytes(sizes, limit) - sum(sizes)


def _rank_weights(sums: _Sums, plan: _Plan, basis: Basis, notes: tuple[str, ...], pipeline_rank: int) -> RankWeights:
    totals: dict[str, float] = defaultdict(float)
    detail: dict[str, int] = {}
    for (component, part), size in sums.parts.items():
        totals[component] += size
        detail[part] = detail.get(part, 0) + math.ceil(size)
    rounding = _allocator_rounding(sums, plan)
    if rounding:
        totals[_OTHER] += rounding
        detail["allocator rounding"] = rounding
    offloaded = min(float(plan.settings.cpu_offload_bytes), sums.decoder)
    if offloaded:
        totals[_LANGUAGE] -= offloaded
        detail["offloaded to host memory"] = -math.floor(offloaded)
    components: dict[str, Amount] = {}
    for component in (_LANGUAGE, _VISION, _OTHER):
        size = math.ceil(totals[component]) if component in totals else 0
        if size <= 0:
            continue
        low = high = size
        own: Basis = "computed" if component == _OTHER and "mtp" not in detail else basis
        note = None
        if not plan.exact:
            low = min(size - 1, math.floor(sums.low[component]))
            high = max(size + 1, math.ceil(sums.high[component]))
            own, note = "assumed", "no sharding rule for this architecture or format"
            if plan.declared is not None:
                note = plan.declared.note
        elif component == _OTHER and "lora slots" in detail:
            spread = detail["lora slots"] // 2
            low, high, own = size - spread, size + spread, "assumed"
            note = "LoRA slots by the shapes of the linear layers"
        elif component != _OTHER and plan.assumed_scales:
            low, high, own = math.floor(size * _SCALES_AS_STORED), math.ceil(size / _SCALES_AS_STORED), "assumed"
            note = "bitsandbytes: scales taken as expanded to 32 bits"
        components[component] = Amount(size, low, high, own, note)
    return RankWeights(
        tensor_rank=0,
        pipeline_rank=pipeline_rank,
        components=components,
        detail={part: size for part, size in detail.items() if size},
        largest_transient=math.ceil(max((p.repacked_from for p in sums.parameters.values()), default=0)),
        notes=notes,
    )
