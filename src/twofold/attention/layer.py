"""The attention layer: every sharing, head count, position and norm is a value of one class."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from twofold.attention.context import AttentionContext
from twofold.attention.score_map import ScoreMapMix
from twofold.cache import LayerCache, Quantized, Stored, spread
from twofold.kernels import KeyValue, Linear, Rotation, attend, rotate
from twofold.spec import ConfigError, ModelConfig


class Attention(nn.Module):
    """Self-attention in which query, key and value need not have a projection each.

    A projection is named after the first role that it plays: with K = V there is no `v_proj`, with Q = K no `k_proj`,
    and with Q = K = V only `q_proj`. What `project` returns is exactly what is cached; `read` makes keys and values
    of it. With K = V that is one tensor:

    - without rotation, the shared projection z_j itself;
    - rope_mode `relative`: R_j z_j, key and value at once; the output is turned back by R_i^-1, so that the value
      seen is R_(j-i) z_j (as in DeepSeek-V4);
    - rope_mode `unrotated`: z_j and the position j; keys are rotated when they are read (as in Gemma 4);
    - rope_mode `decoupled`: the normalised z_j, and one rotated part for all heads (as in multi-head latent attention).

    Args:
        config: The model's description.
        layer: This layer's number, counted from zero.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.head_dim is not None
        self.sharing = config.layer_sharing(layer)
        self.num_heads = config.num_attention_heads
        self.num_groups = config.layer_num_key_value_heads(layer)
        self.head_dim = config.head_dim
        self.window = config.layer_sliding_window(layer)
        self.rope_mode = config.layer_rope_mode(layer)
        self.rotates_heads = config.positions == "rope" and self.rope_mode != "decoupled"
        self.rope_theta = config.rope_theta
        self.rope_width = config.qk_rope_head_dim if self.rope_mode == "decoupled" else 0
        self.norm_eps = config.norm_eps
        self.dropout = config.attention_dropout
        self.implementation = config.attention_implementation
        width = self.head_dim + (self.rope_width or 0)
        self.scale = config.attention_scale if config.attention_scale is not None else width**-0.5

        hidden, bias = config.hidden_size, config.attention_bias
        query_width, group_width = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        self.query_depth = config.query_depth
        if config.query_depth == 2:
            self.q_a_proj = Linear(hidden, query_width, bias=False)
            self.q_b_proj = Linear(query_width, query_width, bias=bias)
        else:
            self.q_proj = Linear(hidden, query_width, bias=bias)
        if not self.sharing.ties_query_key:
            self.k_proj = Linear(hidden, group_width, bias=bias)
        if not self.sharing.ties_key_value:
            self.v_proj = Linear(hidden, group_width, bias=bias)
        self.o_proj = Linear(query_width, hidden, bias=bias)

        self.qk_norm = config.qk_norm
        if config.qk_norm:
            if not self.sharing.ties_query_key:
                self.q_norm = nn.Parameter(torch.ones(self.head_dim))
            # In `relative` mode the scale commutes with the rotation because a rotary pair shares one entry.
            self.k_norm = nn.Parameter(torch.ones(self.head_dim // (2 if self.rope_mode == "relative" else 1)))
        if self.rope_width:
            self.q_rope_proj = Linear(hidden, self.num_heads * self.rope_width, bias=bias)
            self.k_rope_proj = Linear(hidden, self.rope_width, bias=bias)
            self.kv_norm = nn.RMSNorm(group_width, eps=config.norm_eps)
        self.score_map = None if config.score_map == "none" else ScoreMapMix(config.score_map)

    def forward(
        self, hidden_states: Float[Tensor, "B T C"], context: AttentionContext, cache: LayerCache | None = None
    ) -> Float[Tensor, "B T C"]:
        """Attends over the new tokens and those in the cache, to which the new ones are appended.

        Args:
            hidden_states: The new tokens.
            context: Their positions, and what they may see.
            cache: Earlier tokens of the same sequences; None to attend among the new ones only.
        """
        query, new = self.project(hidden_states, context)
        spreads = cache is not None and self._spreads(cache)
        if spreads:
            query, new = self._spread_query(query), tuple(spread(tensor) for tensor in new)
        read = self.read(new if cache is None else cache.append(*new), context)
        mask = context.mask(read.key.shape[2], self.window)
        if self.score_map is not None:
            factor, bias = self.score_map(context.positions, context.dtype)
            query, mask = query * factor, mask.plus(bias.to(query.dtype))
        dropout = self.dropout if self.training else 0.0
        output = attend(
            query, read, mask=mask, scale=self.scale, dropout=dropout, wanted=self.implementation
        )  # (B, H, T, D)
        if spreads:
            output = spread(output)
        if self.rope_mode == "relative":
            cos, sin = context.rotary_tables(self.head_dim)
            output = rotate(output, cos, -sin)
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))  # (B, T, C)
        return projected

    def project(
        self, hidden_states: Float[Tensor, "B T C"], context: AttentionContext
    ) -> tuple[Float[Tensor, "B H T W"], tuple[Tensor, ...]]:
        """The queries, ready to be scored, and what the new tokens add to the cache.

        Returns:
            Queries (B, H, T, W), W = D, or D + D_r in rope_mode decoupled; and a tuple of one tensor where K = V,
            else key and value, each (B, G, T, D). In rope_mode unrotated the positions (B, 1, T, 1) follow, in
            decoupled the rotated part (B, 1, T, D_r).
        """
        if self.rope_mode == "decoupled":
            return self._project_decoupled(hidden_states, context)
        query = self._query(hidden_states)
        key = query if self.sharing.ties_query_key else self._heads(self.k_proj(hidden_states))
        stored: tuple[Tensor, ...]
        if self.sharing.ties_key_value:
            query, stored = self._project_tied(query, key)
        else:
            value = self._heads(self.v_proj(hidden_states))
            if self.qk_norm:
                key = self._unit(key) * self.k_norm
                query = key if self.sharing.ties_query_key else self._unit(query) * self.q_norm
            stored = (key, value)
        if self.rotates_heads:
            cos, sin = context.rotary_tables(self.head_dim)
            query = rotate(query, cos, sin)
            if self.rope_mode == "unrotated":
                stored = (*stored, context.positions[:, None, :, None].int())  # (B, 1, T, 1)
            else:
                stored = (rotate(stored[0], cos, sin), *stored[1:])
        return query, stored

    def read(self, stored: tuple[Stored, ...], context: AttentionContext) -> KeyValue:
        """What is cached, as keys and values; with K = V they are the same tensor, and nothing is copied."""
        recent = stored[0].recent if isinstance(stored[0], Quantized) else None
        if recent is None:
            return self._key_value(stored, context)
        floats = tuple(_last(each, recent.shape[2]) for each in stored)
        return replace(self._key_value(stored, context), recent=self._key_value(floats, context))

    def fold_query(self) -> None:
        """Replaces the two query matrices of `query_depth=2` by their product, for inference.

        Raises:
            ConfigError: where their weights are int8 already.
        """
        if self.q_a_proj.weight.dtype == torch.int8:
            raise ConfigError(
                "fold the queries before the weights become int8; the product of integers would be coarser"
            )
        with torch.no_grad():
            weight = (self.q_b_proj.weight.double() @ self.q_a_proj.weight.double()).to(self.q_b_proj.weight.dtype)
            folded = Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
            folded.weight.copy_(weight)
        folded.bias = self.q_b_proj.bias
        self.q_proj, self.query_depth = folded, 1
        del self.q_a_proj, self.q_b_proj

    def _key_value(self, stored: tuple[Stored, ...], context: AttentionContext) -> KeyValue:
        """Keys and values of what one form of storage holds."""
        tensors, scales = zip(*(_parts(each) for each in stored), strict=True)
        if self.rope_mode == "decoupled":
            return KeyValue(tensors[0], tensors[0], scales[0], scales[0], rope_key=tensors[1], rope_scale=scales[1])
        if self.rope_mode == "unrotated":
            frequencies = context.rotary_frequencies(self.head_dim)
            rotation = Rotation(tensors[1][:, 0, :, 0], frequencies, self.k_norm if self.qk_norm else None)
            return KeyValue(tensors[0], tensors[0], scales[0], scales[0], rotation=rotation)
        return KeyValue(tensors[0], tensors[-1], scales[0], scales[-1])

    def _spreads(self, cache: LayerCache) -> bool:
        """Whether stored vectors are spread over their channels; not where keys are rotated after they are read."""
        return cache.dtype == "int4" and self.rope_mode != "unrotated"

    def _spread_query(self, query: Float[Tensor, "B H T W"]) -> Float[Tensor, "B H T W"]:
        """The query for keys that are spread; the rotated part of rope_mode decoupled is stored by itself."""
        if not self.rope_width:
            return spread(query)
        return torch.cat([spread(part) for part in query.split((self.head_dim, self.rope_width), dim=-1)], dim=-1)

    def _project_tied(self, query: Tensor, shared: Tensor) -> tuple[Tensor, tuple[Tensor]]:
        """Queries and the one tensor before rotation; the key's scale goes into the query where it can."""
        if not self.qk_norm:
            return query, (shared,)
        value = self._unit(shared)
        key_scale = self.k_norm if self.rope_mode != "relative" else self.k_norm.repeat(2)
        query_scale = key_scale if self.sharing.ties_query_key else self.q_norm
        query = value if self.sharing.ties_query_key else self._unit(query)
        folds = self.rope_mode != "unrotated"
        return query * (query_scale * key_scale if folds else query_scale), (value,)

    def _project_decoupled(
        self, hidden_states: Tensor, context: AttentionContext
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        cos, sin = context.rotary_tables(self.rope_width or 0)
        shared_proj = self.q_proj if self.sharing.ties_query_key else self.k_proj
        shared = self.kv_norm(shared_proj(hidden_states))  # (B, T, G·D)
        content = self._heads(shared)  # (B, G, T, D)
        query = content if self.sharing.ties_query_key else self._query(hidden_states)
        query_rope = self.q_rope_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key_rope = rotate(self.k_rope_proj(hidden_states)[:, None], cos, sin)  # (B, 1, T, D_r)
        query = torch.cat((query, rotate(query_rope, cos, sin)), dim=-1)  # (B, H, T, D + D_r)
        return query, (content, key_rope)

    def _query(self, hidden_states: Tensor) -> Tensor:
        if self.query_depth == 2:
            return self._heads(self.q_b_proj(self.q_a_proj(hidden_states)))
        return self._heads(self.q_proj(hidden_states))

    def _heads(self, projected: Float[Tensor, "B T W"]) -> Float[Tensor, "B heads T D"]:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _unit(self, heads: Float[Tensor, "B heads T D"]) -> Float[Tensor, "B heads T D"]:
        """Each head divided by its root mean square, in float32 or wider."""
        wide = heads if heads.dtype == torch.float64 else heads.float()
        return F.rms_norm(wide, (self.head_dim,), eps=self.norm_eps).to(heads.dtype)


def _parts(stored: Stored) -> tuple[Tensor, Tensor | None]:
    return stored[:2] if isinstance(stored, Quantized) else (stored, None)


def _last(stored: Stored, num: int) -> Tensor:
    """The last rows, for which a quantised tensor holds floats."""
    if not isinstance(stored, Quantized):
        return stored[:, :, stored.shape[2] - num :]
    assert stored.recent is not None
    return stored.recent
