"""A model's architecture and sizes, read from ``config.json``.

Reading is strict: what the decoder cannot compute exactly is refused by name. An architecture is one entry of
:data:`FAMILIES`; ``docs/models.md`` says how to add one.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, shown
from engine.models.fields import Fields
from kernels.activation import Activation

# Far above every model that there is, and low enough that no size that follows from them overflows.
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20  # hidden and intermediate sizes
MAX_LAYERS = 2**12
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**12
MAX_CONTEXT = 2**22  # tokens; every position has its angles in memory
MAX_FACTOR = 1e6  # of RoPE, and caps and scales of attention: 1 / MAX_FACTOR is the least
MAX_THETA = 1e15


SCREENED_SHARE = 1 / 12
"""An output head with at least this share of a model's parameters is screened, which takes half of its memory
once more. A smaller one takes too little of a step to be worth that."""


class RopeType(enum.StrEnum):
    """Kinds of rotary position embedding that :mod:`engine.models.rope` computes."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding; the names are those of ``rope_parameters`` in ``config.json``."""

    type: RopeType = RopeType.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position: int = 0  # llama3, yarn: tokens, length of the context before scaling
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None derives it from factor and the two below
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions


class QKNormSpan(enum.Enum):
    """What one RMS norm of queries and keys spans."""

    HEAD = "head"  # each head by itself; all share one weight
    ROW = "row"  # all query heads together, and all key heads together


@dataclass(frozen=True, slots=True)
class NormPlaces:
    """Where a layer has RMS norms, and their names in the checkpoint; ``None`` where there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # on what attention adds to the residual
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None  # on what the MLP adds to the residual

    @property
    def count(self) -> int:
        """How many there are."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return sum(name is not None for name in names)


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture fixes, and its defaults for keys that ``config.json`` does not have.

    The decoder reads the first group. The second is what :func:`parse_model_config` starts from; where the
    default of an optional key is ``None``, the architecture does not know the key and it is ignored.
    """

    qkv_bias: bool | None = None  # None: as ``attention_bias`` says, which covers the output projection, too
    qk_norm: QKNormSpan | None = None  # RMS norms of queries and keys before RoPE
    norms: NormPlaces = NormPlaces()
    norms_round_once: bool = False  # norms multiply by their weight in float32
    norms_add_one: bool = False  # norms multiply by 1 + weight, in float32, and round once
    scaled_embedding: bool = False  # by sqrt(hidden_size), rounded to the model's dtype

    activation_key: str = "hidden_act"
    activation: Activation = Activation.SILU
    gelu_is_tanh: bool = False  # the name "gelu" means the tanh approximation (files of before it had a name)
    head_dim: int | None = None  # None: hidden_size / heads
    num_kv_heads: int | None = None  # None: as many as heads
    max_position: int = 32768
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window: int | None = None  # of every layer, unless one of the next two applies
    upper_windows: bool = False  # only with ``use_sliding_window``, and from layer ``max_window_layers`` on
    full_attention_every: int | None = None  # every n-th layer has no window, unless ``layer_types`` differs


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(max_position=2048),
    "MistralForCausalLM": Family(qkv_bias=False, num_kv_heads=8, sliding_window=4096, max_position=131072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, sliding_window=4096, upper_windows=True),
    "Qwen3ForCausalLM": Family(qk_norm=QKNormSpan.HEAD, head_dim=128, sliding_window=4096, upper_windows=True),
    "GemmaForCausalLM": Family(
        norms_add_one=True,
        scaled_embedding=True,
        activation=Activation.GELU_TANH,
        gelu_is_tanh=True,
        head_dim=256,
        max_position=8192,
        tie_word_embeddings=True,
    ),
    "Gemma2ForCausalLM": Family(
        norms=NormPlaces(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        norms_add_one=True,
        scaled_embedding=True,
        activation_key="hidden_activation",
        activation=Activation.GELU_TANH,
        head_dim=256,
        num_kv_heads=4,
        max_position=8192,
        tie_word_embeddings=True,
        query_pre_attn_scalar=256.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        sliding_window=4096,
        full_attention_every=2,
    ),
    "Olmo2ForCausalLM": Family(
        qk_norm=QKNormSpan.ROW,
        norms=NormPlaces(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        norms_round_once=True,
        max_position=2048,
        norm_eps=1e-5,
    ),
}
"""By the name of the architecture in ``config.json``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the decoder, the loader and the planner need to know about a model."""

    architecture: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int  # longest context, in tokens
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    activation: Activation = Activation.SILU
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    query_pre_attn_scalar: float | None = None  # None: head_dim
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens; empty: no layer has one
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # of the checkpoint: "bfloat16", ...

    @property
    def family(self) -> Family:
        """What the architecture fixes."""
        return FAMILIES[self.architecture]

    @property
    def attention_scale(self) -> float:
        """Factor on the dot product of a query and a key."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Elements of the weights of a layer's norms of queries and of keys; 0 where there is none."""
        if self.family.qk_norm is None:
            return 0, 0
        if self.family.qk_norm is QKNormSpan.HEAD:
            return self.head_dim, self.head_dim
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    def window(self, layer: int) -> int | None:
        """Sliding window of ``layer`` in tokens, the query's own included; ``None`` is full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def largest_window(self) -> int | None:
        """The most tokens that any layer sees; ``None`` if a layer has full attention.

        Only with a largest window can blocks be freed that it has left behind: a block holds every layer's KV.
        """
        windows = [window for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == len(self.windows) else None

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, tied ones counted once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        attention += self.qkv_bias * self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        attention += self.out_bias * self.hidden_size + sum(self.qk_norm_sizes)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        layer += self.family.norms.count * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def context_length(wanted: int | None, config: ModelConfig) -> int:
    """The context in tokens to serve: ``wanted``, by default the model's own.

    Raises:
        ConfigError: the model's is shorter.
    """
    longest = config.max_position_embeddings
    if wanted is not None and wanted > longest:
        raise ConfigError(f"max_model_len is {wanted} but the model's context is {longest} tokens; lower it")
    return wanted or longest


def read_model_config(folder: str | Path) -> ModelConfig:
    """Read ``config.json``, and the end tokens of ``generation_config.json`` where there is one.

    Both spellings of RoPE are understood: ``rope_parameters``, and ``rope_theta`` with ``rope_scaling``.

    Raises:
        ConfigError: the folder or the file is missing or broken, or asks for something unsupported; the
            message names it.
    """
    folder = Path(folder)
    if not os.path.isdir(folder):  # Path's method raises for long names
        raise ConfigError(f"model folder {folder} does not exist; set model to a folder with config.json")
    raw = _read_json(folder / "config.json", required=True)
    generation = _read_json(folder / "generation_config.json", required=False)
    return parse_model_config(raw, generation, str(folder))


def parse_model_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: str = "model"
) -> ModelConfig:
    """Like :func:`read_model_config`, from parsed JSON; ``where`` begins the error messages."""
    fields = Fields(raw, where)
    architecture, family = _family(fields)
    activation = _activation(fields, family)
    _refuse_unsupported(fields)

    hidden_size = fields.integer("hidden_size", most=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", most=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", family.num_kv_heads or num_heads, MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.integer("head_dim", family.head_dim or hidden_size // num_heads, MAX_HEAD_DIM)
    if head_dim % 2:
        raise fields.error(f"head_dim is {head_dim}, but the rotary embedding needs an even number")
    num_layers = fields.integer("num_hidden_layers", most=MAX_LAYERS)
    max_position = fields.integer("max_position_embeddings", family.max_position, MAX_CONTEXT)
    rope, max_position = _rope(fields, max_position)

    if family.qkv_bias is None:
        qkv_bias = out_bias = fields.boolean("attention_bias", False)
    else:
        qkv_bias, out_bias = family.qkv_bias, False

    vocab_size = fields.integer("vocab_size", most=MAX_VOCAB)
    generated = Fields(generation or {}, where)
    bos = generated.token_ids("bos_token_id") or fields.token_ids("bos_token_id")
    ends = generated.token_ids("eos_token_id") or fields.token_ids("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", most=MAX_WIDTH),
        max_position_embeddings=max_position,
        norm_eps=fields.positive("rms_norm_eps", family.norm_eps, 1.0),
        rope=rope,
        activation=activation,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        query_pre_attn_scalar=_known(fields, "query_pre_attn_scalar", family.query_pre_attn_scalar),
        attention_soft_cap=_known(fields, "attn_logit_softcapping", family.attn_logit_softcapping),
        logit_soft_cap=_known(fields, "final_logit_softcapping", family.final_logit_softcapping),
        windows=_windows(fields, family, num_layers),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(end for end in ends if end < vocab_size),  # no other is ever generated
        dtype=fields.text("dtype") or fields.text("torch_dtype"),
    )


def _family(fields: Fields) -> tuple[str, Family]:
    architectures = fields.raw.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise fields.error(
            f"architecture {name if isinstance(name, str) else 'unnamed'} is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    return str(name), family


def _activation(fields: Fields, family: Family) -> Activation:
    name = fields.raw.get(family.activation_key, family.activation)
    if family.gelu_is_tanh and name == "gelu":
        return Activation.GELU_TANH
    try:
        return Activation(name)
    except ValueError:
        supported = ", ".join(repr(known.value) for known in Activation)
        raise fields.error(
            f"{family.activation_key} {shown(name)} is not supported; supported: {supported}"
        ) from None


def _known(fields: Fields, key: str, default: float | None) -> float | None:
    """A cap or scale of a family that knows the key, which ``default`` says; else ``None``."""
    return None if default is None else fields.optional_factor(key, default, MAX_FACTOR)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention is not supported; only causal attention is")
    if fields.boolean("mlp_bias", False):
        raise fields.error("mlp_bias is not supported; only models without biases in the MLP are")
    quantization = fields.raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        name = method if isinstance(method, str) else shown(method)
        raise fields.error(
            f"quantization_config ({name}) is not supported; use a checkpoint in bfloat16, float16 or float32"
        )
    if fields.raw.get("auto_map"):
        raise fields.error("auto_map asks for code from the checkpoint, which is never run")


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.sliding_window is None:
        return ()
    layer_types = _layer_types(fields, num_layers)
    window = fields.optional_integer("sliding_window", family.sliding_window)
    every = family.full_attention_every
    if not family.upper_windows and every is None:
        if layer_types and len(set(layer_types)) > 1:
            raise fields.error("layer_types that differ between layers are not supported for this architecture")
        return () if window is None else (window,) * num_layers
    if family.upper_windows and not fields.boolean("use_sliding_window", False):
        window = None
    if layer_types is None:
        if window is None:
            return ()
        if every is not None:
            full = [(layer + 1) % every == 0 for layer in range(num_layers)]
        else:
            first = fields.count("max_window_layers", 28)
            full = [layer < first for layer in range(num_layers)]
        layer_types = ["full_attention" if sees_all else "sliding_attention" for sees_all in full]
    windows = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return () if not any(windows) else windows


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    layer_types = fields.raw.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list):
        raise fields.error(f"layer_types is {shown(layer_types)} but must be a list")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                f"layer type {shown(kind)} is not supported; supported: 'full_attention', 'sliding_attention'"
            )
    if len(layer_types) != num_layers:
        raise fields.error(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return layer_types


def _rope(fields: Fields, max_position: int) -> tuple[RopeConfig, int]:
    """The rotary parameters and the longest context in tokens."""
    raw = fields.raw.get("rope_parameters") or fields.raw.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        raise fields.error("rope_parameters must be an object")
    if any(isinstance(value, dict) for value in raw.values()):
        raise fields.error("rope_parameters that differ between layer types are not supported")
    rope = Fields(raw, fields.where, "rope_parameters.")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    try:
        rope_type = RopeType(kind)
    except ValueError:
        supported = ", ".join(known.value for known in RopeType)
        raise fields.error(f"RoPE type {shown(kind)} is not supported; supported: {supported}") from None
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise fields.error(f"partial_rotary_factor {partial} is not supported; supported: 1.0")

    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if not 1.0 < theta <= MAX_THETA:
        raise fields.error(f"rope_theta is {theta} but must be above 1 and at most {MAX_THETA:g}")
    if rope_type is RopeType.DEFAULT:
        return RopeConfig(theta=theta), max_position
    factor = rope.optional_number("factor")
    if (factor is None and rope_type is not RopeType.YARN) or not (
        factor is None or 1.0 / MAX_FACTOR <= factor <= MAX_FACTOR
    ):
        raise fields.error(
            f"rope_parameters.factor is {factor} but must be from {1.0 / MAX_FACTOR:g} to {MAX_FACTOR:g}"
        )
    if rope_type is RopeType.LINEAR:
        return RopeConfig(rope_type, theta, factor or 1.0), max_position

    # As in transformers, a value outside the parameters wins over one among them.
    outer = fields.optional_integer("original_max_position_embeddings", None)
    inner = rope.optional_integer("original_max_position_embeddings", None)
    original = outer or inner or max_position
    if rope_type is RopeType.LLAMA3:
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if not 0.0 < low < high:
            raise fields.error(f"low_freq_factor {low} must be above 0 and below high_freq_factor {high}")
        llama3 = RopeConfig(
            rope_type, theta, factor or 1.0, original, low_freq_factor=low, high_freq_factor=high
        )
        return llama3, max_position
    factor = max_position / original if factor is None else factor
    yarn = RopeConfig(
        rope_type,
        theta,
        factor,
        original,
        beta_fast=_beta(rope, "beta_fast", 32.0),
        beta_slow=_beta(rope, "beta_slow", 1.0),
        attention_factor=rope.optional_factor("attention_factor", None, MAX_FACTOR),
        mscale=_mscale(rope, "mscale"),
        mscale_all_dim=_mscale(rope, "mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )
    if not (outer or inner):
        return yarn, max_position
    # Qwen's model cards enable YaRN without raising max_position_embeddings; they mean the scaled length.
    if factor * original > MAX_CONTEXT:
        raise fields.error(
            f"rope_parameters.factor {factor} makes a context of {factor * original:g} tokens, but at most "
            f"{MAX_CONTEXT} are supported"
        )
    return yarn, max(max_position, int(factor * original))


def _beta(rope: Fields, key: str, default: float) -> float:
    """Turns of a dimension within the context, of YaRN; 0 stands for the default."""
    return default if rope.raw.get(key) == 0 else rope.positive(key, default, MAX_FACTOR)


def _mscale(rope: Fields, key: str) -> float | None:
    """Of YaRN; 0 and null say that there is none."""
    return None if rope.raw.get(key) in (None, 0) else rope.positive(key, 1.0, MAX_FACTOR)


def _instead(folder: Path) -> str:
    """What a folder without ``config.json`` is, if it is one that users often take for a model's."""
    if next(folder.glob("*.gguf"), None):
        return "; weights must be in safetensors, not GGUF"
    inner = next(folder.glob("snapshots/*/config.json"), None)  # as in the hub's cache
    return "" if inner is None else f"; did you mean {inner.parent}?"


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(
                f"{path.parent} has no {path.name}, so it is not a model folder{_instead(path.parent)}"
            ) from None
        return {}
    except RecursionError:
        raise ConfigError(f"cannot read {path}: it nests too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
