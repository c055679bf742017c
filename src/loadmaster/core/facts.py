"""The types that every part of loadmaster speaks in.

All are frozen. ``None`` means unknown, never zero. Sizes are bytes (``int``), times are seconds.
Every planned figure is an :class:`Amount`: an expected value, bounds, and the basis it stands on.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

Basis = Literal["read", "measured", "computed", "assumed"]
Severity = Literal["error", "warning", "note"]
Confidence = Literal["certain", "likely", "possible"]
Origin = Literal["given", "model", "engine-default", "derived"]


class Amount(Struct, frozen=True):
    """A number of bytes with what it stands on.

    ``read``: from file headers. ``measured``: from a recorded run. ``computed``: an exact rule.
    ``assumed``: a constant that nobody measured here; then ``low`` < ``high``.
    """

    bytes: int
    low: int
    high: int
    basis: Basis
    note: str | None = None

    @classmethod
    def exact(cls, value: int, basis: Basis = "computed", note: str | None = None) -> Amount:
        return cls(value, value, value, basis, note)


class Component(Struct, frozen=True):
    """One line of a card's load. ``name`` is one of the names in docs/reference/json.md."""

    name: str
    bytes: int
    low: int
    high: int
    basis: Basis
    note: str | None = None


# ---------------------------------------------------------------------------------------------- findings


class Evidence(Struct, frozen=True, omit_defaults=True):
    """What proves a finding: ``source`` says where (log, command, file, config, plan, gpu, host)."""

    source: str
    text: str
    line: int | None = None
    path: str | None = None


class Fix(Struct, frozen=True):
    """A remedy that can be pasted. ``argv``: flags to add or replace, ``[]`` when none.

    ``remove``: flags to drop. ``env``: variables to set. ``command``: a shell line. ``replanned``: the planner ran
    with it and it holds.
    """

    why: str
    argv: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    env: dict[str, str] = {}
    command: str | None = None
    replanned: bool = False


class Finding(Struct, frozen=True):
    code: str
    severity: Severity
    title: str
    cause: str
    evidence: tuple[Evidence, ...] = ()
    fixes: tuple[Fix, ...] = ()
    confidence: Confidence = "certain"


# ---------------------------------------------------------------------------------------------- the model


class TensorGroup(Struct, frozen=True):
    """Tensors of one name pattern, dtype, shape and size, over all layers and experts.

    ``name`` is the tensor name with the layer number replaced by ``{l}`` (the number after ``layers.``,
    ``blocks.``, ``h.``) and the expert number by ``{e}`` (after ``experts.``); other numbers stay.
    ``layers`` maps layer number -> number of such tensors in it; ``None`` where the name has no layer.
    ``nbytes`` is the size of ONE tensor, from ``data_offsets`` (not shape x dtype, so unknown dtypes count too).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    count: int
    layers: dict[int, int] | None = None

    @property
    def total_bytes(self) -> int:
        return self.nbytes * self.count


class TextConfig(Struct, frozen=True, kw_only=True):
    """The language model's configuration, normalised over the spellings of config.json."""

    model_type: str | None = None
    dtype: str | None = None  # "bfloat16", "float16", "float32"
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None
    attn_output_gate: bool = False
    # "full_attention" | "linear_attention" | "sliding_attention", one per decoder layer
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None  # raw, also from rope_parameters
    rotary_dim: int | None = None  # head_dim x partial_rotary_factor
    uses_mrope: bool = False
    # mixture of experts
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    first_k_dense_replace: int | None = None
    # gated delta net
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_conv_kernel_dim: int | None = None
    mamba_ssm_dtype: str | None = None
    # multi-head latent attention
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    # multi-token prediction heads stored in the checkpoint
    num_mtp_layers: int | None = None


class VisionConfig(Struct, frozen=True, kw_only=True):
    model_type: str | None = None
    depth: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_heads: int | None = None
    in_channels: int | None = None
    patch_size: int | None = None
    spatial_merge_size: int | None = None
    temporal_patch_size: int | None = None
    out_hidden_size: int | None = None
    num_position_embeddings: int | None = None
    deepstack_layers: tuple[int, ...] = ()
    window_size: int | None = None
    fullatt_block_indexes: tuple[int, ...] = ()
    # fixed-size towers (Gemma 3, SigLIP): every image becomes image_size x image_size
    image_size: int | None = None
    tokens_per_image: int | None = None


class Processor(Struct, frozen=True, kw_only=True):
    """Limits of the image and video processor. Areas are pixels (width x height)."""

    image_processor_type: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_max_pixels: int | None = None
    source: str | None = None  # file that said it, or "class default"


class Quantization(Struct, frozen=True, kw_only=True):
    """What ``quantization_config`` declares, and what the tensors themselves show."""

    method: str | None = None  # "compressed-tensors", "awq", "gptq", "fp8", "modelopt", "mxfp4", "bitsandbytes", ...
    # compressed-tensors: "pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized"
    format: str | None = None
    bits: int | None = None
    group_size: int | None = None  # None: per tensor or channel
    symmetric: bool | None = None
    zero_point: bool | None = None
    block_shape: tuple[int, int] | None = None  # fp8 block: (128, 128)
    desc_act: bool | None = None
    ignore: tuple[str, ...] = ()  # module names or patterns left unquantised, verbatim
    kv_cache_scheme: dict[str, Any] | None = None
    declared: dict[str, Any] | None = None  # the raw object
    label: str | None = None  # for people: "compressed-tensors w4 g32"


class ClassQuantization(Struct, frozen=True, kw_only=True):
    """Scheme of one module class, read from the tensors ("experts", "attention", ...)."""

    module_class: str
    scheme: str  # "w4 g32", "w4 g128 zero points", "fp8 block 128x128", "bfloat16", ...
    tensors: int
    bytes: int
    parameters: int


class Part(Struct, frozen=True, kw_only=True):
    """Parameters and file bytes of one part of the model ("language.experts", "vision", ...)."""

    name: str
    parameters: int
    bytes: int
    tensors: int


class ModelFile(Struct, frozen=True, kw_only=True):
    name: str
    bytes: int
    kind: str  # "weights", "index", "config", "tokenizer", "processor", "template", "code", "leftover", "other"
    # "ok", "missing", "truncated", "lfs-pointer", "header-invalid", "unreadable", "leftover", "not-indexed",
    # "hash-mismatch"
    status: str = "ok"
    tensors: int | None = None
    # the content was hashed and is (not) what the cache says; None: not hashed, or no hash is known
    content_verified: bool | None = None


class ModelFacts(Struct, frozen=True, kw_only=True):
    """All that can be known of a model without loading it."""

    name: str
    path: str | None = None
    # "safetensors" and "gguf": headers were read. "config": configuration only, tensors are computed from it.
    # "known": the configuration is from the table of public models.
    format: Literal["safetensors", "gguf", "config", "known"] = "safetensors"
    architecture: str | None = None
    model_type: str | None = None
    text: TextConfig = TextConfig()
    vision: VisionConfig | None = None
    processor: Processor | None = None
    quantization: Quantization = Quantization()
    quantization_by_class: tuple[ClassQuantization, ...] = ()
    tensors: tuple[TensorGroup, ...] = ()
    parts: tuple[Part, ...] = ()
    parameters: int | None = None  # without prediction heads (MTP); quantised ones counted unpacked
    weight_bytes: int | None = None
    files: tuple[ModelFile, ...] = ()
    has_chat_template: bool | None = None
    auto_map: bool = False  # config.json names code of its own
    config: dict[str, Any] = {}  # raw config.json
    findings: tuple[Finding, ...] = ()  # integrity
    notes: tuple[str, ...] = ()  # what is assumed: a configuration or a quantisation taken from the name


# ---------------------------------------------------------------------------------------------- GPUs


class GpuFacts(Struct, frozen=True, kw_only=True):
    """One card. ``total_bytes``: what CUDA reports and vLLM multiplies by the utilisation.

    ``driver_total_bytes``: NVML's total, a little more. ``free_bytes``: free now, ``None`` if not read.
    """

    index: int
    name: str | None = None
    total_bytes: int
    driver_total_bytes: int | None = None
    free_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    bandwidth_bytes_per_s: int | None = None
    sm_count: int | None = None
    peer_access: bool | None = None  # peer-to-peer with another of its kind over PCIe or NVLink
    nvlink: bool | None = None
    uuid: str | None = None
    processes: tuple[GpuProcess, ...] | None = None
    source: str = "spec"  # "spec", "table", "nvml", "recording"
    note: str | None = None  # what is assumed or special about it: an estimated total, a MIG instance


class GpuProcess(Struct, frozen=True):
    pid: int
    name: str | None
    used_bytes: int | None


class HostFacts(Struct, frozen=True, kw_only=True):
    """The machine around the cards; every field None when it was not looked at.

    ``holds_cards``: the launch's cards are in this machine; False when they were described and may be elsewhere.
    ``missing_files``: files that the launch names by a path and that are not here.
    """

    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    cpu_count: int | None = None
    ports_in_use: tuple[int, ...] = ()
    holds_cards: bool = True
    missing_files: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------- the launch


class EngineFacts(Struct, frozen=True):
    """Engine and version. ``version`` None: unknown, the newest known rules are used and said."""

    name: Literal["vllm", "llamacpp", "sglang", "lmdeploy"] = "vllm"
    version: str | None = None


class LaunchArgs(Struct, frozen=True, kw_only=True):
    """A launch as the engine would understand it.

    ``flags``: canonical long name ("--max-model-len") -> value; ``True``/``False`` for switches, numbers as
    numbers ("4K" is 4096), JSON as objects, several values as a list. The model is not among them.
    ``extra``: what nobody knows, verbatim, in place order. ``argv``: the same launch, normalised.
    ``image``/``shm_bytes``/``ipc_host``/``mounts``/``gpu_access``: what a container's text says around it.
    """

    model: str | None = None
    flags: dict[str, Any] = {}
    env: dict[str, str] = {}
    unknown_flags: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()  # the flag tokens as written ("32k" stays "32k"), model and program left out
    # "argv", "serve", "module", "docker-run", "compose", "kubernetes", "yaml", "supervisor", "systemd", "other"
    kind: str = "argv"
    image: str | None = None
    engine_version: str | None = None  # from an image tag, when the text names one
    visible_gpus: int | None = None  # number of cards that the text gives the engine, when it says
    shm_bytes: int | None = None
    ipc_host: bool | None = None
    damage: tuple[Evidence, ...] = ()  # copying damage seen in the text, with line numbers
    refused: tuple[Evidence, ...] = ()  # what the engine's parser would refuse: no value, no number, no such choice
    # for each word of ``extra`` how many of ``flags`` stand before it; -1: right after the model
    extra_places: tuple[int, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()  # (path on the host as written, path in the container)
    gpu_access: bool | None = None  # a docker or compose text hands cards to the container; None: no such text
    name: str | None = None  # of the service, the manifest or the program, where the text names it
    others: tuple[str, ...] = ()  # further launches of the text: names of services, or places
    # a damaged text put right: what it would launch, and that command as one line to paste
    whole: LaunchArgs | None = None
    repaired: str | None = None


class Setting(Struct, frozen=True):
    """An effective value and where it comes from."""

    value: Any
    origin: Origin
    note: str | None = None


class Settings(Struct, frozen=True, kw_only=True):
    """The engine's effective settings: the flags, else the model's, else the version's default."""

    version: str  # rules used, e.g. "0.33"
    version_note: str | None = None  # set when the version is unknown, older than 0.17 or newer than 0.33
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    max_model_len: int | None = None
    max_model_len_auto: bool = False  # "auto" or -1: the longest that fits, up to max_model_len
    enable_chunked_prefill: bool = True
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"  # "auto", "bfloat16", "float16", "fp8", "fp8_e5m2", "int8", ...
    kv_cache_dtype_bytes: float = 2
    block_size: int | None = None
    enable_prefix_caching: bool = True
    mamba_cache_mode: str = "none"  # "none", "align", "all"
    mamba_ssm_cache_dtype: str | None = None
    enforce_eager: bool = False
    cudagraph_mode: str = "FULL_AND_PIECEWISE"  # "NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"
    cudagraph_capture_sizes: tuple[int, ...] = ()
    quantization: str | None = None
    language_model_only: bool = False
    mm_encoder_tp_mode: str = "weights"  # "weights" | "data"
    skip_mm_profiling: bool = False
    image_limit: int | None = None  # images per prompt; None: engine default
    video_limit: int | None = None
    dummy_image_size: tuple[int, int] | None = None  # width, height from --limit-mm-per-prompt
    max_pixels: int | None = None  # the cap given by --mm-processor-kwargs
    min_pixels: int | None = None
    speculative_method: str | None = None
    num_speculative_tokens: int = 0
    cpu_offload_bytes: int = 0
    disable_custom_all_reduce: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    # what decides the cache layout and the split of layers beyond the above
    compute_capability: tuple[int, int] | None = None  # of the least capable card; None: unknown
    decode_context_parallel_size: int = 1
    disable_hybrid_kv_cache_manager: bool = False
    async_scheduling: bool | None = None  # None: the version's default
    num_gpu_blocks_override: int | None = None
    pipeline_layer_partition: tuple[int, ...] | None = None  # VLLM_PP_LAYER_PARTITION
    attention_backend: str | None = None  # "FLASH_ATTN", "FLASHINFER", "TRITON_MLA", ...; None: chosen by the engine
    gdn_prefill_backend: str = "auto"  # "auto", "triton", "flashinfer", "cutedsl"
    video_pruning: bool = False  # --video-pruning-rate > 0
    second_model_runner: bool = False  # vLLM's model runner "V2"
    expandable_segments: bool = False  # PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) has expandable_segments:True
    origins: dict[str, Setting] = {}


# ---------------------------------------------------------------------------------------------- the plan


class RankWeights(Struct, frozen=True, kw_only=True):
    """Weights that one rank (pipeline stage x tensor rank) holds after loading.

    ``components``: "weights.language", "weights.vision", "weights.other" (rope caches, heads).
    ``detail``: finer split for people, part -> bytes. ``largest_transient``: bytes of the largest tensor that
    exists twice while it is repacked or loaded.
    """

    tensor_rank: int
    pipeline_rank: int
    components: dict[str, Amount]
    detail: dict[str, int] = {}
    largest_transient: int = 0
    notes: tuple[str, ...] = ()
    known: bool = (
        True  # False: the size of (some of) the weights is not known, and the components are assumed or absent
    )

    @property
    def total(self) -> int:
        return sum(amount.bytes for amount in self.components.values())


class CacheGroup(Struct, frozen=True, kw_only=True):
    """Layers that share one block table: ``kind`` "full", "sliding", "state", "mla"."""

    kind: str
    layers: int
    page_bytes: int  # one block of one layer, padding included
    bytes_per_token: int | None = None
    state_bytes: int | None = None
    window: int | None = None
    request_blocks: int | None = None  # blocks that one request holds whatever its length (state)
    request_blocks_grow: bool = True  # False: only ``request_blocks``; True: also one for each block of tokens


class CacheLayout(Struct, frozen=True, kw_only=True):
    """How one rank's KV cache and recurrent state are paged, for one engine version."""

    block_tokens: int
    pool_block_bytes: int  # bytes of one block id over all layers of a rank
    groups: tuple[CacheGroup, ...]
    printed_rule: str  # name of the rule by which this version prints its token count
    padding_percent: float | None = None
    exact: bool = True  # False: no rule for this architecture, bounds are wide
    notes: tuple[str, ...] = ()


class KvCache(Struct, frozen=True, kw_only=True):
    """The cache of the smallest rank, as the contract has it."""

    available_bytes: int | None
    block_tokens: int | None
    blocks: int | None
    tokens: int | None  # as this version prints it
    max_concurrency: float | None
    bytes_per_request_at_max_len: int | None
    available_low_bytes: int | None = None
    available_high_bytes: int | None = None
    max_model_len: int | None = None
    largest_model_len: int | None = None  # longest context that one request can have in this cache
    notes: tuple[str, ...] = ()


class ImagePlan(Struct, frozen=True, kw_only=True):
    """What the pictures cost and which is the largest that is served."""

    tokens_per_pixel: float | None = None
    profiled_tokens: int | None = None  # of the dummy picture or video
    profiled_pixels: int | None = None
    profiled_modality: Literal["image", "video"] | None = None  # what the dummy is
    largest_pixels: int | None = None  # that processor, context and caps admit
    largest_size: tuple[int, int] | None = None  # a square-ish example, width x height
    largest_tokens: int | None = None
    refused: tuple[str, ...] = ()  # sentences: sizes within the processor's limit that the context refuses
    peak_bytes: int | None = None  # vision activations of the largest image, per rank


class GpuLoad(Struct, frozen=True, kw_only=True):
    """One card's load. ``components`` without ``headroom`` add up to ``peak_bytes["serving"]``."""

    index: int
    name: str | None = None
    total_bytes: int
    driver_total_bytes: int | None = None
    free_bytes: int | None = None
    budget_bytes: int
    tensor_rank: int = 0
    pipeline_rank: int = 0
    data_rank: int = 0
    components: tuple[Component, ...]
    peak_bytes: dict[str, int]  # "start", "steady", "serving"
    peak_low_bytes: dict[str, int]
    peak_high_bytes: dict[str, int]


class Change(Struct, frozen=True):
    """One flag that a recommendation set, or dropped (``to`` False). ``from_`` is ``from`` in JSON; None: not given."""

    flag: str
    to: Any
    why: str
    from_: Any = field(default=None, name="from")
    bytes: int | None = None  # what the change frees (positive) or costs (negative) on the tightest card
    default: Any = None  # what the engine takes where the flag was not given


class LaunchPlan(Struct, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    changed: tuple[Change, ...] = ()
    env: dict[str, str] = {}


class ModelSummary(Struct, frozen=True, kw_only=True):
    architecture: str | None
    quantization: str | None
    parameters: int | None
    name: str | None = None
    weight_bytes: int | None = None


class LoadSheet(Struct, frozen=True, kw_only=True):
    """The plan: per GPU, per component, with bounds and basis. ``fits`` None: could not tell."""

    fits: bool | None
    engine: EngineFacts
    model: ModelSummary
    gpus: tuple[GpuLoad, ...]
    kv_cache: KvCache | None
    launch: LaunchPlan
    findings: tuple[Finding, ...] = ()
    images: ImagePlan | None = None
    settings: Settings | None = None
    notes: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()  # wishes of a recommendation that its launch does not meet, in words
    schema: int = 1
