"""What a job is: the file that `surefoot run` takes. YAML or JSON, unknown keys refused.

Relative paths are relative to the directory the command is run in, as with torchrun.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from surefoot.errors import UsageError
from surefoot.policy import PolicySpec
from surefoot.section import Section

SPEC_ENVIRONMENT_KEY = "SUREFOOT_SPEC"
"""The launcher hands the spec to the ranks in this environment variable, as JSON."""

CAUSE_ENVIRONMENT_KEY = "SUREFOOT_CAUSE"
"""Why the launcher starts the ranks, for the attempt record."""
FROM_SEED_ENVIRONMENT_KEY = "SUREFOOT_FROM_SEED"
""""1": start over although the job has progress."""

JOB_NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class RetentionSpec(Section):
    """Which checkpoints stay on storage: whatever one of these rules keeps. Pinned ones always stay."""

    keep_last: int | None = Field(default=5, ge=1)
    """The newest so many that a restart could use; null: all."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """The first at or after each multiple of so many steps, for ever."""
    keep_best: int = Field(default=0, ge=0)
    """The so many with the lowest training loss (mean of the last steps before the save)."""
    keep_stable: int = Field(default=2, ge=2)
    """The newest so many STABLE ones: roll-backs go there."""


class CheckpointSpec(Section):
    """When to snapshot and save, where snapshots are staged, and what is kept."""

    save_every_steps: int | None = Field(default=None, ge=1)
    """Make a snapshot durable every so many steps."""
    save_every_seconds: float | Literal["auto"] | None = 30.0
    """Make a snapshot durable when the last save is so long ago. null: never by time; auto: Young/Daly's interval, from
    the measured cost of a save and the failures that this job has had."""
    snapshot_every_steps: int = Field(default=1, ge=0)
    """Keep a snapshot in memory every so many steps; 0: only when saving."""
    num_buffers: int = Field(default=3, ge=1, le=8)
    """Staging buffers per rank. Three are needed for per-step snapshots; with one a save waits for the one before."""
    staging_dir: Path = Path("/dev/shm")  # noqa: S108  the point is to be on tmpfs
    """A tmpfs folder; each job gets its own folder in it."""
    retention: RetentionSpec = RetentionSpec()
    """Which checkpoints stay on storage."""

    @field_validator("num_buffers")
    @classmethod
    def _one_is_for_saves_only(cls, value: int, info: ValidationInfo) -> int:
        if value == 1 and info.data.get("snapshot_every_steps", 0) > 0:
            raise ValueError("1 leaves nothing to go back to while it is filled; needs snapshot_every_steps: 0")
        return value

    @field_validator("save_every_seconds", mode="before")
    @classmethod
    def _is_interval(cls, value: object) -> object:
        # One sentence instead of what each member of the union has against it.
        if value is None or value == "auto":
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
        raise ValueError("must be a number of seconds greater than 0, auto or null")


class RestartSpec(Section):
    """How often ranks may be started again."""

    max_restarts: int = Field(default=20, ge=0)
    """Restarts allowed in any window; 0: the first failure ends the job."""
    window_seconds: float = Field(default=600.0, gt=0)
    """More than `max_restarts` restarts in this window end the job."""


class HangSpec(Section):
    """How long ranks may show no progress before they are killed and started again."""

    enabled: bool = True
    """false: never; ranks under a debugger, say."""
    start_seconds: float = Field(default=1800.0, gt=0)
    """Limit until the first step of an attempt is done: loading, building the model, compiling."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Limit of each later step; null: 30 times the median step, 300 s at least."""
    eval_seconds: float = Field(default=3600.0, gt=0)
    """Limit inside `with session.evaluating()`."""
    save_seconds: float = Field(default=1800.0, gt=0)
    """Limit of the last save and of the end: storage that does not answer holds them up."""


class ModelSpec(Section):
    """A Llama-type decoder (transformers' LlamaConfig names)."""

    vocab_size: int = Field(default=4096, ge=300)
    """Entries of the byte-level BPE vocabulary, so also rows of the embedding."""
    hidden_size: int = Field(default=256, ge=8)
    """Width of the residual stream; a multiple of num_attention_heads."""
    intermediate_size: int = Field(default=688, ge=8)
    """Width of the gated feed-forward layer."""
    num_hidden_layers: int = Field(default=4, ge=1)
    """Decoder layers."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Attention heads of each layer."""
    tie_word_embeddings: bool = True
    """Input and output embeddings are one tensor."""

    @model_validator(mode="after")
    def _heads_divide_hidden_size(self) -> ModelSpec:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        return self

    def num_parameters(self) -> int:
        """Return the number of parameters of the model this describes."""
        per_layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size
        per_layer += 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * per_layer + embeddings + self.hidden_size


class RecipeSpec(Section):
    """Settings of the built-in LLM recipe (`entrypoint: -m surefoot_worker.recipe`)."""

    data: Path | None = None
    """A folder or a text file; null: the source files of the running Python's standard library."""
    cache_dir: Path = Path(".surefoot/data")
    """Where the tokenizer and the tokens are kept."""
    model: ModelSpec = ModelSpec()
    """Size of the model."""
    sequence_length: int = Field(default=256, ge=8)
    """Tokens of one sample."""
    global_batch_size: int = Field(default=16, ge=1)
    """Samples of one optimizer step over all ranks; at least one per rank."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Samples per forward pass; null: all of a rank's part at once."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps of the whole job."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps over which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Where the cosine ends, as a part of learning_rate."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging factors of the gradient and of its square."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this L2 norm."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 autocast where the machine computes in bf16."""
    num_workers: int = Field(default=0, ge=0)
    """DataLoader worker processes per rank."""


class JobSpec(Section):
    """One training job."""

    job: str = Field(pattern=JOB_NAME_PATTERN)
    """Its name: the folder of its checkpoints."""
    entrypoint: str = Field(min_length=1)
    """`-m package.module [args]` or `script.py [args]`, as after torchrun."""
    nproc_per_node: int = Field(default=1, ge=1, le=128)
    """Ranks on this node."""
    storage: Path = Path(".surefoot/checkpoints")
    """Checkpoints go to `<storage>/<job>/`."""
    run_dir: Path = Path(".surefoot/run")
    """Logs and events go to `<run_dir>/<job>/`."""
    init_from: Path | None = None
    """A Hugging Face folder (safetensors) whose weights the job begins with; read only when it starts from the seed."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides initial weights, data order and dropout."""
    threads_per_rank: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; null: the cores shared out evenly."""
    start_method: Literal["auto", "forkserver", "spawn"] = "auto"
    """auto: forkserver, and spawn with a stated reason where preloading fails."""
    env: dict[str, str] = Field(default={})
    """Extra environment of the ranks."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When to snapshot and save, where snapshots are staged, and what is kept."""
    restart: RestartSpec = RestartSpec()
    """How often ranks may be started again."""
    hang: HangSpec = HangSpec()
    """How long ranks may show no progress."""
    policy: PolicySpec = PolicySpec()
    """What recovery does by itself about anomalies; in a file also the path of a file that holds this section."""
    recipe: RecipeSpec | None = None
    """Settings of the built-in recipe; only with `entrypoint: -m surefoot_worker.recipe`."""

    @property
    def entrypoint_words(self) -> list[str]:
        """The entrypoint split as a shell would."""
        return shlex.split(self.entrypoint)

    @property
    def recipe_or_defaults(self) -> RecipeSpec:
        """The recipe's settings; all of them have defaults."""
        return self.recipe or RecipeSpec()

    @property
    def job_run_dir(self) -> Path:
        """The folder of this job's logs and events."""
        return self.run_dir / self.job

    @property
    def events_path(self) -> Path:
        """The file that every process of the job appends its events to."""
        return self.job_run_dir / "events.jsonl"

    def to_environment(self) -> dict[str, str]:
        """Return the variable that carries the keys set in this spec, with absolute paths, to the ranks."""
        return {SPEC_ENVIRONMENT_KEY: self.absolute().model_dump_json(exclude_unset=True)}

    def absolute(self) -> JobSpec:
        """Return the same spec with storage and run_dir absolute and set."""
        update = {"storage": self.storage.absolute(), "run_dir": self.run_dir.absolute()}
        return self.model_copy(update=update)


class SpecKey(NamedTuple):
    """One key of a spec, for documentation: its dotted name, type, default and meaning."""

    name: str
    type: str
    default: str
    description: str


def spec_keys(section: type[BaseModel] = JobSpec, prefix: str = "") -> Iterator[SpecKey]:
    """Yield every key that a spec may hold, sections before what is in them."""
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        kind = "section" if inner else _type_name(field.annotation)
        if inner and get_origin(field.annotation) is tuple:
            kind = "list of sections"
        default = "" if inner else "required" if field.is_required() else _spelled(field.get_default())
        yield SpecKey(f"{prefix}{name}", kind, default, " ".join((field.description or "").split()))
        if inner:
            yield from spec_keys(inner, f"{prefix}{name}.")


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " or ".join(str(member.value) for member in annotation)
    if get_origin(annotation) is tuple and get_args(annotation)[-1] is Ellipsis:
        return f"list of {_type_name(get_args(annotation)[0])}"
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    if any(get_origin(member) is Literal for member in members):
        return " | ".join(_type_name(member) for member in members).replace("nullType", "null")
    text = annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    return text.replace("pathlib._local.", "").replace("pathlib.", "").replace("None", "null")


def _spelled(value: Any) -> str:
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    return json.dumps(plain)


def load_spec(path: Path) -> JobSpec:
    """Read a spec file.

    Raises:
        UsageError: not readable, not YAML or JSON, an unknown key or a wrong value; names the key.
    """
    data = _read_mapping(path, "job, entrypoint, nproc_per_node")
    if isinstance(data.get("policy"), str):
        data["policy"] = _read_mapping(Path(data["policy"]), "mode, probation_steps, ladder")
    return parse_spec(data)


def _read_mapping(path: Path, examples: str) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(str(path), f"is not UTF-8 text: {error}") from None
    language = "JSON" if path.suffix == ".json" else "YAML"
    try:
        data = json.loads(text) if language == "JSON" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: the date 2026-13-45
        raise UsageError(str(path), f"is not valid {language}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UsageError(str(path), f"must hold a mapping of keys such as {examples}")
    return data


def parse_spec(data: dict[str, Any]) -> JobSpec:
    """Validate a spec given as a mapping.

    Raises:
        UsageError: an unknown key or a wrong value; names the first such key and what is allowed.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise _usage_error(error) from None


def _usage_error(error: ValidationError) -> UsageError:
    # An unknown key first: a misspelt required key is reported as unknown, not as missing.
    problems = sorted(error.errors(include_url=False), key=lambda p: p["type"] != "extra_forbidden")
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"]) or "spec"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown key; allowed here: {', '.join(_allowed_keys(first['loc']))}"
    elif first["type"] == "missing":
        message = "is required"
    else:
        message = f"{message} (got {first['input']!r})"
    if len(problems) > 1:
        others = ", ".join(".".join(str(part) for part in p["loc"]) for p in problems[1:])
        message = f"{message}; also wrong: {others}"
    return UsageError(key, message)


def _allowed_keys(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = JobSpec
    for part in location[:-1]:
        if isinstance(part, int):  # place in a list of sections
            continue
        inner = _section_of(model.model_fields[part].annotation)
        assert inner is not None, "only sections have unknown keys"
        model = inner
    return list(model.model_fields)
