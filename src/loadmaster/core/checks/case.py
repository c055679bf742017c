"""What a check looks at: the launch, the model, the cards, the machine, and what follows from them.

Everything derived (settings, plan) is made once, when the first check asks for it, and is ``None`` when
a fact that it needs is unknown. A check that gets ``None`` stays silent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from loadmaster.core.engineversion import at_least, version_key
from loadmaster.core.facts import (
    Confidence,
    EngineFacts,
    Evidence,
    GpuFacts,
    HostFacts,
    LaunchArgs,
    LoadSheet,
    ModelFacts,
    Settings,
)
from loadmaster.core.flagtable import releases_looked_at
from loadmaster.core.knownmodels import BY_NAME

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_CONTAINERS = ("docker-run", "compose", "kubernetes")
_PLACEHOLDER = re.compile(r"\$[({A-Za-z_]|\{\{|^<.*>$")
SWITCH_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class LaunchCase:
    """One launch with all that is known around it. Attributes follow :func:`loadmaster.core.check.check_launch`."""

    def __init__(
        self,
        launch: LaunchArgs,
        model: ModelFacts | None,
        gpus: Sequence[GpuFacts] | None,
        engine: EngineFacts,
        host: HostFacts | None,
    ) -> None:
        self.launch = launch
        self.model = model
        self.gpus = tuple(gpus) if gpus else None
        self.engine = engine
        self.host = host

    # ------------------------------------------------------------------------------------ version

    @cached_property
    def version(self) -> str | None:
        """The engine's version if it can be compared, else None ("latest", "nightly")."""
        for text in (self.engine.version, self.launch.engine_version):
            if text is None:
                continue
            try:
                version_key(text)
            except ValueError:
                continue
            return text.removeprefix("v")
        return None

    def since(self, bound: str) -> bool | None:
        """Whether the version is ``bound`` or newer; None when it is unknown."""
        return None if self.version is None else at_least(self.version, bound)

    def newest_or_since(self, bound: str) -> bool:
        """As :meth:`since`, an unknown version counting as the newest."""
        return self.since(bound) is not False

    @property
    def ahead(self) -> bool:
        """Whether the version is of a later minor than the newest release whose flags are known."""
        newest = releases_looked_at()[-1]
        return self.version is not None and version_key(self.version)[:2] > version_key(newest)[:2]

    @property
    def version_words(self) -> str:
        return f"vLLM {self.version}" if self.version else "vLLM"

    # ------------------------------------------------------------------------------------ flags

    def has(self, flag: str) -> bool:
        return flag in self.launch.flags

    def value(self, flag: str) -> Any:
        """The flag's value, the last one when it was given several; None when it is absent."""
        value = self.launch.flags.get(flag)
        if isinstance(value, list) and len(value) == 1:
            return value[0]
        return value

    def switch(self, flag: str) -> bool | None:
        """True or False for a switch that was given, None when it was not."""
        value = self.value(flag)
        if isinstance(value, bool) or value is None:
            return value
        return SWITCH_WORDS.get(str(value).lower())

    def integer(self, flag: str) -> int | None:
        value = self.value(flag)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value or abs(value) > 1 << 62:
            return None
        return int(value) if int(value) == value else None

    def number(self, flag: str) -> float | None:
        value = self.value(flag)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value)

    def text(self, flag: str) -> str | None:
        value = self.value(flag)
        return value if isinstance(value, str) else None

    def table(self, flag: str) -> dict[str, Any] | None:
        value = self.value(flag)
        return value if isinstance(value, dict) else None

    def shown(self, flag: str) -> str:
        """The flag as it stands in the command, for evidence."""
        written = self.written(flag)
        if written is not None:
            return f"{flag} {written}"
        value = self.launch.flags.get(flag)
        if value is True:
            return flag
        if value is False:
            return "--no-" + flag.removeprefix("--")
        if isinstance(value, (dict, list)):
            import json

            return f"{flag} {json.dumps(value)}"
        return f"{flag} {value}"

    def written(self, flag: str) -> str | None:
        """The value token of a flag as it was written, before any reading; None when the tokens are not kept."""
        plain = flag.removeprefix("--").replace("-", "_")
        tokens = self.launch.raw
        found = None
        for number, token in enumerate(tokens):
            name, equals, value = token.partition("=")
            if not name.startswith("--") or name[2:].replace("-", "_") != plain:
                continue
            if equals:
                found = value
            elif number + 1 < len(tokens) and not tokens[number + 1].startswith("--"):
                found = tokens[number + 1]
        return found

    def evidence(self, *flags: str) -> tuple[Evidence, ...]:
        return tuple(Evidence("command", self.shown(flag)) for flag in flags if self.has(flag))

    def env_evidence(self, *names: str) -> tuple[Evidence, ...]:
        return tuple(
            Evidence("command", f"{name}={self.launch.env[name]}") for name in names if name in self.launch.env
        )

    # ------------------------------------------------------------------------------------ sizes and cards

    def size(self, flag: str) -> int:
        """A parallel size: the flag's, 1 when it is absent or no number."""
        value = self.integer(flag)
        return value if value is not None and value >= 1 else 1

    @property
    def tensor_parallel(self) -> int:
        return self.size("--tensor-parallel-size")

    @property
    def pipeline_parallel(self) -> int:
        return self.size("--pipeline-parallel-size")

    @property
    def data_parallel(self) -> int:
        """Replicas on this machine."""
        local = self.integer("--data-parallel-size-local")
        return local if local is not None and local >= 1 else self.size("--data-parallel-size")

    @property
    def world(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @cached_property
    def visible(self) -> tuple[int, str] | None:
        """How many cards the text lets the engine see, and the words that say so."""
        for name in _VISIBLE:
            value = self.launch.env.get(name)
            if value is None or is_placeholder(value):
                continue
            count = device_count(value)
            if count is not None:
                return count, f"{name}={value}"
        if self.launch.visible_gpus is not None:
            return self.launch.visible_gpus, f"the {self.launch.kind} text gives {self.launch.visible_gpus}"
        return None

    @cached_property
    def cards(self) -> int | None:
        """Cards that the engine can use: the fewest that text and machine agree on; None when nobody says."""
        counts = [count for count in (self.visible[0] if self.visible else None, self.gpu_count) if count is not None]
        return min(counts) if counts else None

    @property
    def gpu_count(self) -> int | None:
        return len(self.gpus) if self.gpus else None

    @cached_property
    def used_gpus(self) -> tuple[GpuFacts, ...] | None:
        """The cards that the ranks of this launch run on: those that the text names, else the first ones."""
        if not self.gpus:
            return None
        named = self.launch.env.get("CUDA_VISIBLE_DEVICES")
        chosen = self.gpus
        if named is not None and re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", named):
            indexes = [int(part) for part in named.split(",")]
            by_index = {gpu.index: gpu for gpu in self.gpus}
            if all(index in by_index for index in indexes):
                chosen = tuple(by_index[index] for index in indexes)
        return chosen[: max(self.world, 1)]

    @cached_property
    def planned_gpus(self) -> tuple[GpuFacts, ...]:
        """All cards, those that the ranks run on first: the plan fills them in this order."""
        used = self.used_gpus or ()
        return (*used, *(gpu for gpu in self.gpus or () if gpu not in used))

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        """The lowest compute capability among the used cards; None when one of them is unknown."""
        if not self.used_gpus or any(gpu.compute_capability is None for gpu in self.used_gpus):
            return None
        return min(gpu.compute_capability for gpu in self.used_gpus if gpu.compute_capability is not None)

    @property
    def in_container(self) -> bool:
        return self.launch.kind in _CONTAINERS or self.launch.image is not None

    # ------------------------------------------------------------------------------------ the model

    @property
    def model_name(self) -> str | None:
        """The model as the command names it; None when that is a placeholder."""
        name = self.launch.model
        return None if name is None or is_placeholder(name) else name

    @property
    def is_hub_name(self) -> bool:
        return self.model_name is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", self.model_name) is not None

    @cached_property
    def model_confidence(self) -> Confidence:
        """How sure it is that ``model`` describes what the command names."""
        if self.model is None:
            return "possible"
        if self.model.format != "known" or self.is_hub_name:
            return "certain"
        return "likely"

    @property
    def assumed_format(self) -> bool:
        """Whether the checkpoint's quantisation is only read off its name."""
        return self.model is not None and (self.model.quantization.label or "").endswith(BY_NAME)

    @property
    def format_label(self) -> str:
        """The checkpoint's quantisation for people, without what it is read from."""
        label = self.model.quantization.label if self.model is not None else None
        return (label or "").removesuffix(BY_NAME)

    def model_evidence(self, text: str) -> Evidence:
        """Evidence from the model's configuration, with where it comes from."""
        assert self.model is not None
        if self.model.format == "known":
            return Evidence("config", f"{self.model.name}: {text} (from the table of public models)")
        return Evidence("config", text, path="config.json")

    @cached_property
    def text_only(self) -> bool:
        """Whether the command serves no pictures: no tower is loaded or every limit is 0."""
        if self.switch("--language-model-only"):
            return True
        limits = self.table("--limit-mm-per-prompt")
        if not limits or "image" not in limits:
            return False
        return count_limit(limits, "image") == 0 and count_limit(limits, "video") in (0, None)

    # ------------------------------------------------------------------------------------ derived

    @cached_property
    def settings(self) -> Settings | None:
        """Effective settings; None when model or cards are unknown."""
        if self.model is None or not self.gpus or self.engine.name != "vllm":
            return None
        from loadmaster.core.settings import effective_settings

        return effective_settings(self.launch, self.model, self.planned_gpus, self.planned_engine)

    @property
    def planned_engine(self) -> EngineFacts:
        return EngineFacts(self.engine.name, self.version)

    @cached_property
    def sheet(self) -> LoadSheet | None:
        """The load sheet of the launch; None when model or cards are unknown or too few for the ranks."""
        if self.settings is None or self.model is None or not self.gpus or self.world > len(self.gpus):
            return None
        if self.model.format == "gguf":
            return None
        from loadmaster.core.plan import plan_memory

        return plan_memory(self.model, self.planned_gpus, self.launch, self.planned_engine)

    def plan(self, launch: LaunchArgs) -> LoadSheet:
        """The load sheet of the launch with other flags. Model and cards must be known."""
        from loadmaster.core.plan import plan_alone

        assert self.model is not None and self.gpus
        return plan_alone(self.model, self.planned_gpus, launch, self.planned_engine)


def is_placeholder(text: str) -> bool:
    """Whether a text still has a variable in it that nobody filled in."""
    return _PLACEHOLDER.search(text) is not None


def device_count(value: str) -> int | None:
    """Devices that a CUDA_VISIBLE_DEVICES value names, as CUDA counts them; None when it names all or is odd."""
    text = value.strip().strip("\"'")
    if text.lower() in ("all", "void"):
        return None
    if text.lower() in ("", "none", "nodevfiles"):
        return 0
    count = 0
    for part in text.split(","):
        part = part.strip()
        if not re.fullmatch(r"-?\d+|(GPU|MIG)-[\w/-]+", part):
            return None
        if part.startswith("-"):
            break  # CUDA stops at the first index that is not valid
        count += 1
    return count


def count_limit(limits: dict[str, Any], modality: str) -> int | None:
    """The number of items that --limit-mm-per-prompt allows; None when it does not say."""
    value = limits.get(modality)
    if isinstance(value, dict):
        value = value.get("count")
    return value if isinstance(value, int) and not isinstance(value, bool) else None
