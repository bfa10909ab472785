"""The description of a model. Field names are those of Transformers; derived values are properties."""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from pydantic import ConfigDict, SkipValidation

from twofold.spec.errors import ConfigError, did_you_mean
from twofold.spec.layers import of_layer, resolve_per_layer
from twofold.spec.sharing import ProjectionSharing, parse_sharing

T = TypeVar("T")
# One value for all layers or one a layer. Lists, patterns and other spellings are read by ModelConfig itself.
PerLayer: TypeAlias = Annotated[T | tuple[T, ...], SkipValidation]

Positions: TypeAlias = Literal["learned", "sinusoidal", "rope", "none"]
RopeMode: TypeAlias = Literal["relative", "unrotated", "decoupled"]
ScoreMap: TypeAlias = Literal["none", "paper", "product"]
Normalization: TypeAlias = Literal["layernorm", "rmsnorm"]
Activation: TypeAlias = Literal["gelu", "gelu_new", "silu"]
AttentionImplementation: TypeAlias = Literal["auto", "native", "triton", "torch"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A transformer with shared projections. Invalid combinations raise `ConfigError` when it is made."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    vocab_size: int = 50_304
    """Number of tokens in the vocabulary."""
    hidden_size: int
    """Width C of the residual stream."""
    num_hidden_layers: int
    """Number of transformer blocks."""
    num_attention_heads: int
    """Number H of query heads."""
    num_key_value_heads: PerLayer[int] | None = None
    """Number G of key/value heads, for all layers or by layer. Default: H, which is multi-head attention."""
    head_dim: int | None = None
    """Width D of one head. Default: hidden_size / num_attention_heads."""
    intermediate_size: int | None = None
    """Width of the MLP. Default: 4 x hidden_size."""
    max_position_embeddings: int = 2_048
    """Longest context in tokens; with learned positions it is a hard limit."""
    sharing: PerLayer[ProjectionSharing] = ProjectionSharing.QKV
    """Which of query, key and value share a projection, for all layers or by layer. A "+" sets score_map."""
    positions: Positions = "learned"
    """How token positions enter the model."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_mode: RopeMode | None = None
    """What the one cached tensor holds where K = V meets rope. Default there: relative; elsewhere it must be unset."""
    qk_rope_head_dim: int | None = None
    """Width D_r of the separate rotary part in rope_mode decoupled. Default there: 32."""
    causal: bool = True
    """True for decoders: a token sees itself and earlier tokens only."""
    score_map: ScoreMap = "none"
    """The paper's "+" for non-causal attention: a learned mix of the scores with fixed sinusoids."""
    sliding_window: PerLayer[int | None] = None
    """A token sees this many nearest positions, itself included, for all layers or by layer; None for all."""
    query_depth: int = 1
    """2 trains the query as a product of two matrices, which fold into one for inference."""
    qk_norm: bool = False
    """Normalise queries and keys by their root mean square over the head dim, before positions."""
    attention_scale: float | None = None
    """Factor on q·k. Default: 1 / sqrt(width of a query)."""
    attention_bias: bool = True
    """Biases in the attention projections."""
    mlp_bias: bool = True
    """Biases in the MLP."""
    gated_mlp: bool = False
    """True for down(act(gate(x)) * up(x)), as in Llama."""
    activation: Activation = "gelu"
    """The MLP's activation; gelu is the exact form, gelu_new the tanh approximation of GPT-2."""
    normalization: Normalization = "layernorm"
    """Kind of the norms before attention, before the MLP and at the end."""
    norm_eps: float = 1e-5
    """Epsilon of every norm."""
    tie_word_embeddings: bool = True
    """Use the token embedding as the output matrix too."""
    hidden_dropout: float = 0.0
    """Dropout probability on embeddings and on what each block adds."""
    attention_dropout: float = 0.0
    """Dropout probability on attention weights."""
    initializer_range: float = 0.02
    """Standard deviation of initial weights."""
    attention_implementation: AttentionImplementation = field(default="auto", compare=False)
    """What computes attention; TWOFOLD_ATTENTION wins over it. It leaves equality of models and run ids alone."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            _check_count(name, getattr(self, name))
        _check_count("max_position_embeddings", self.max_position_embeddings)
        self._fill_sharing()
        self._fill_widths()
        self._check_choices()
        self._check_ranges()
        self._fill_rope_mode()
        self._check_combinations()

    def layer_sharing(self, layer: int) -> ProjectionSharing:
        """Sharing of a layer, counted from zero."""
        return of_layer(self.sharing, layer)

    def layer_num_key_value_heads(self, layer: int) -> int:
        """Number G of key/value heads of a layer, counted from zero."""
        assert self.num_key_value_heads is not None  # filled on construction
        return of_layer(self.num_key_value_heads, layer)

    def layer_sliding_window(self, layer: int) -> int | None:
        """Window of a layer in tokens, or None; counted from zero."""
        return of_layer(self.sliding_window, layer)

    def layer_rope_mode(self, layer: int) -> RopeMode | None:
        """How a layer's one cached tensor meets rotary positions; None where two are cached or nothing rotates."""
        return self.rope_mode if self.layer_sharing(layer).ties_key_value else None

    def with_changes(self, **changes: Any) -> "ModelConfig":
        """This model with some fields changed; what was derived from others is derived from the new ones.

        A field with the value that it has by default counts as derived: head_dim of hidden_size / heads follows both.

        Raises:
            ConfigError: for changes that give no valid model.
        """
        values = {name: getattr(self, name) for name in field_names()}
        derived = {
            "head_dim": self.hidden_size // self.num_attention_heads,
            "intermediate_size": 4 * self.hidden_size,
            "num_key_value_heads": self.num_attention_heads,
        }
        values.update({name: None for name, default in derived.items() if values[name] == default})
        bare = ModelConfig(**{**values, "rope_mode": None, "qk_rope_head_dim": None, **changes})
        if bare.rope_mode is None or "rope_mode" in changes:
            return bare
        return ModelConfig(**{**values, **changes})

    @property
    def label(self) -> str:
        """The paper's name of the variant, for example `Q-GQA-4`; `mixed` when layers differ.

        `decoupled` is added where it holds, because it changes what is cached.
        """
        if isinstance(self.sharing, tuple) or isinstance(self.num_key_value_heads, tuple):
            return "mixed"
        heads, groups = self.num_attention_heads, self.layer_num_key_value_heads(0)
        grouped = "" if groups == heads else "MQA" if groups == 1 else f"GQA-{groups}"
        if not grouped:
            name = self.sharing.label
        else:
            name = grouped if self.sharing is ProjectionSharing.QKV else f"Q-{grouped}"
        name = f"{name} decoupled" if self.rope_mode == "decoupled" else name
        return name if self.score_map == "none" else f"({name})+"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _fill_sharing(self) -> None:
        pluses: set[bool] = set()

        def parse(text: Any) -> ProjectionSharing:
            sharing, plus = parse_sharing(text)
            pluses.add(plus)
            return sharing

        self._set("sharing", resolve_per_layer("sharing", self.sharing, self.num_hidden_layers, parse))
        if len(pluses) == 2:
            raise ConfigError("sharing has a '+' on some layers only; all layers have the same score map")
        if True in pluses and self.score_map == "none":
            self._set("score_map", "paper")

    def _fill_widths(self) -> None:
        heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % heads:
                raise ConfigError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {heads}; "
                    "change one of them or set head_dim"
                )
            self._set("head_dim", self.hidden_size // heads)
        if self.intermediate_size is None:
            self._set("intermediate_size", 4 * self.hidden_size)
        _check_count("head_dim", self.head_dim)
        _check_count("intermediate_size", self.intermediate_size)

        def parse_groups(groups: Any) -> int:
            _check_count("num_key_value_heads", groups)
            if heads % groups:
                raise ConfigError(
                    f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}; "
                    f"use a divisor of {heads}"
                )
            return int(groups)

        given = heads if self.num_key_value_heads is None else self.num_key_value_heads
        groups = resolve_per_layer("num_key_value_heads", given, self.num_hidden_layers, parse_groups)
        self._set("num_key_value_heads", groups)

        def parse_window(window: Any) -> int | None:
            if window is None:
                return None
            _check_count("sliding_window", window)
            return int(window)

        window = resolve_per_layer("sliding_window", self.sliding_window, self.num_hidden_layers, parse_window)
        self._set("sliding_window", window)

    def _check_choices(self) -> None:
        for name, choices in (
            ("positions", Positions),
            ("score_map", ScoreMap),
            ("normalization", Normalization),
            ("activation", Activation),
            ("attention_implementation", AttentionImplementation),
        ):
            _check_choice(name, getattr(self, name), get_args(choices))
        if self.rope_mode is not None:
            _check_choice("rope_mode", self.rope_mode, get_args(RopeMode))

    def _check_ranges(self) -> None:
        if self.query_depth not in (1, 2):
            raise ConfigError(f"query_depth must be 1 or 2; got {self.query_depth}")
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        for name in ("rope_theta", "norm_eps", "initializer_range", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be finite and above 0; got {value}")

    def _fill_rope_mode(self) -> None:
        ties = any(self.layer_sharing(layer).ties_key_value for layer in range(self.num_hidden_layers))
        if self.positions == "rope" and ties:
            if self.rope_mode is None:
                self._set("rope_mode", "relative")
        elif self.rope_mode is not None:
            raise ConfigError(
                f"rope_mode '{self.rope_mode}' needs positions 'rope' and a sharing with K = V; leave it out otherwise"
            )
        if self.rope_mode == "decoupled":
            if self.qk_rope_head_dim is None:
                self._set("qk_rope_head_dim", 32)
            _check_count("qk_rope_head_dim", self.qk_rope_head_dim)
        elif self.qk_rope_head_dim is not None:
            raise ConfigError("qk_rope_head_dim needs rope_mode 'decoupled'; leave it out otherwise")

    def _check_combinations(self) -> None:
        assert self.head_dim is not None
        for layer in range(self.num_hidden_layers):
            sharing, groups = self.layer_sharing(layer), self.layer_num_key_value_heads(layer)
            if sharing.ties_query_key and groups != self.num_attention_heads:
                raise ConfigError(
                    f"sharing '{sharing.slug}' uses one tensor as query and key, so num_key_value_heads must equal "
                    f"num_attention_heads {self.num_attention_heads}; got {groups}"
                )
            if sharing.ties_query_key and self.query_depth == 2:
                raise ConfigError(f"query_depth 2 needs its own query; sharing '{sharing.slug}' ties it to the key")
            rotates_head = self.positions == "rope" and self.layer_rope_mode(layer) != "decoupled"
            if rotates_head and self.head_dim % 2:
                raise ConfigError(f"rope rotates pairs, so head_dim must be even; got {self.head_dim}")
        if self.rope_mode == "decoupled" and self.qk_rope_head_dim is not None and self.qk_rope_head_dim % 2:
            raise ConfigError(f"rope rotates pairs, so qk_rope_head_dim must be even; got {self.qk_rope_head_dim}")
        if self.rope_mode == "decoupled" and self.qk_norm:
            raise ConfigError("rope_mode 'decoupled' already normalises the cached vector; leave qk_norm out")
        if self.causal and self.score_map != "none":
            raise ConfigError(
                f"score_map '{self.score_map}' is for non-causal attention; set causal: false, "
                "or score_map: none without a '+' in sharing"
            )


def field_names() -> tuple[str, ...]:
    """Names of the fields of `ModelConfig`."""
    return tuple(each.name for each in fields(ModelConfig))


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number, at least 1; got {value!r}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        nearest = did_you_mean(str(value), choices)
        raise ConfigError(f"{name} '{value}' is unknown{nearest} Use one of {', '.join(choices)}")
