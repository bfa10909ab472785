"""How many parameters a model has and how many multiply-accumulates one forward pass takes."""

from dataclasses import dataclass, fields

from twofold.spec import ConfigError, ModelConfig

SCORE_MAP_CHANNELS = {"none": 0, "paper": 10, "product": 12}
"""Channels m of each score map: one learned weight for each, in every layer."""

# (input width, output width, has a bias) of one linear map.
_Linear = tuple[int, int, bool]


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Trained numbers of a model, by part. A parameter that two parts use is counted once."""

    embedding: int
    """Token embedding, V x C."""
    positions: int
    """Learned positions; 0 for every other kind."""
    attention: int
    """Projections with their biases, norms inside attention, and the weights of the score map, over all layers."""
    mlp: int
    """MLP matrices with their biases, over all layers."""
    norms: int
    """The norms before attention, before the MLP and at the end."""
    output: int
    """The output matrix, V x C; 0 where it is the token embedding."""

    @property
    def total(self) -> int:
        """All parameters."""
        return _total(self)


@dataclass(frozen=True, kw_only=True)
class MacCount:
    """Multiply-accumulates of one forward pass over one sequence: matrix products only.

    Masks are not exploited: scores and values count T x T, causal or windowed or not, as in the paper's table.
    """

    attention_projections: int
    """The linear maps of attention; with query_depth 2 as trained, before the two query matrices are folded."""
    scores_and_values: int
    """Query times key and weights times value."""
    score_map: int
    """The weighted sum of the score map's channels, without writing its tensor out; 0 without one."""
    mlp: int
    """The MLP's matrices."""
    output_head: int
    """The output matrix, at every position."""

    @property
    def total(self) -> int:
        """All multiply-accumulates; one is two floating-point operations."""
        return _total(self)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of a model, part by part.

    Args:
        config: The model.

    Returns:
        The counts; `total` equals the number of elements in the parameters of the module built from the config.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    embedding = config.vocab_size * hidden
    norm = 2 * hidden if config.normalization == "layernorm" else hidden  # rmsnorm has a weight but no bias
    return ParameterCount(
        embedding=embedding,
        positions=config.max_position_embeddings * hidden if config.positions == "learned" else 0,
        attention=sum(_attention_parameters(config, layer) for layer in range(layers)),
        mlp=layers * sum(_linear_parameters(linear) for linear in _mlp_linears(config)),
        norms=(2 * layers + 1) * norm,
        output=0 if config.tie_word_embeddings else embedding,
    )


def count_linears(config: ModelConfig) -> tuple[int, int]:
    """Weights of all matrices that a token is multiplied with, the output matrix among them, and their outputs."""
    layers = range(config.num_hidden_layers)
    linears = [linear for layer in layers for linear in (*_attention_linears(config, layer), *_mlp_linears(config))]
    linears.append((config.hidden_size, config.vocab_size, False))
    return _macs_per_token(linears), sum(outputs for _, outputs, _ in linears)


def count_macs(config: ModelConfig, sequence_length: int) -> MacCount:
    """Counts the multiply-accumulates of one forward pass over one sequence.

    Additions, norms, rotations, softmax and activations are left out, as is usual.

    Args:
        config: The model.
        sequence_length: Number T of tokens. It may exceed `max_position_embeddings`: the formula does not mind.

    Raises:
        ConfigError: when the length is not positive.
    """
    if sequence_length < 1:
        raise ConfigError(f"sequence_length must be at least 1; got {sequence_length}")
    layers = range(config.num_hidden_layers)
    pairs = sequence_length * sequence_length
    projections = sum(_macs_per_token(_attention_linears(config, layer)) for layer in layers)
    return MacCount(
        attention_projections=sequence_length * projections,
        scores_and_values=pairs * sum(_macs_per_pair(config, layer) for layer in layers),
        score_map=config.num_hidden_layers * _score_map_macs(config, sequence_length),
        mlp=sequence_length * config.num_hidden_layers * _macs_per_token(_mlp_linears(config)),
        output_head=sequence_length * config.vocab_size * config.hidden_size,
    )


def _attention_linears(config: ModelConfig, layer: int) -> list[_Linear]:
    """The linear maps of one attention layer, each named after the first role it plays."""
    assert config.head_dim is not None
    hidden, bias, sharing = config.hidden_size, config.attention_bias, config.layer_sharing(layer)
    query_width = config.num_attention_heads * config.head_dim
    key_value_width = config.layer_num_key_value_heads(layer) * config.head_dim
    if config.query_depth == 2:
        linears = [(hidden, query_width, False), (query_width, query_width, bias)]  # q_a_proj, q_b_proj
    else:
        linears = [(hidden, query_width, bias)]  # q_proj
    if not sharing.ties_query_key:
        linears.append((hidden, key_value_width, bias))  # k_proj
    if not sharing.ties_key_value:
        linears.append((hidden, key_value_width, bias))  # v_proj
    if config.layer_rope_mode(layer) == "decoupled":
        assert config.qk_rope_head_dim is not None
        linears.append((hidden, config.num_attention_heads * config.qk_rope_head_dim, bias))  # q_rope_proj
        linears.append((hidden, config.qk_rope_head_dim, bias))  # k_rope_proj
    linears.append((query_width, hidden, bias))  # o_proj
    return linears


def _attention_parameters(config: ModelConfig, layer: int) -> int:
    linears = sum(_linear_parameters(linear) for linear in _attention_linears(config, layer))
    return linears + _attention_norm_parameters(config, layer) + SCORE_MAP_CHANNELS[config.score_map]


def _attention_norm_parameters(config: ModelConfig, layer: int) -> int:
    assert config.head_dim is not None
    rope_mode = config.layer_rope_mode(layer)
    if rope_mode == "decoupled":
        return config.layer_num_key_value_heads(layer) * config.head_dim  # kv_norm over the content part
    if not config.qk_norm:
        return 0
    # In mode relative the key scale is constant within each rotary pair, so that it folds into the query.
    key_scale = config.head_dim // 2 if rope_mode == "relative" else config.head_dim
    query_scale = 0 if config.layer_sharing(layer).ties_query_key else config.head_dim
    return query_scale + key_scale


def _mlp_linears(config: ModelConfig) -> list[_Linear]:
    assert config.intermediate_size is not None
    inward = (config.hidden_size, config.intermediate_size, config.mlp_bias)  # up_proj, gate_proj
    outward = (config.intermediate_size, config.hidden_size, config.mlp_bias)  # down_proj
    return [inward, inward, outward] if config.gated_mlp else [inward, outward]


def _macs_per_pair(config: ModelConfig, layer: int) -> int:
    """Multiply-accumulates for one query and one key position, over all heads: the score, then the value."""
    assert config.head_dim is not None
    rotary = config.qk_rope_head_dim if config.layer_rope_mode(layer) == "decoupled" else 0
    assert rotary is not None
    return config.num_attention_heads * (config.head_dim + rotary + config.head_dim)


def _score_map_macs(config: ModelConfig, sequence_length: int) -> int:
    """The weights meet the sinusoids of single positions first, so only `product` has a term for each pair.

    `paper`: a sum over the row's channels plus one over the column's. `product`: its weights are a 2 x 2 matrix for
    each of m/4 frequencies, between the sine and cosine of the row and those of the column.
    """
    per_token = SCORE_MAP_CHANNELS[config.score_map]
    per_pair = per_token // 2 if config.score_map == "product" else 0
    return sequence_length * per_token + sequence_length * sequence_length * per_pair


def _linear_parameters(linear: _Linear) -> int:
    inputs, outputs, has_bias = linear
    return inputs * outputs + (outputs if has_bias else 0)


def _macs_per_token(linears: list[_Linear]) -> int:
    return sum(inputs * outputs for inputs, outputs, _ in linears)


def _total(count: ParameterCount | MacCount) -> int:
    return sum(int(getattr(count, field.name)) for field in fields(count))
