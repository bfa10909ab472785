"""The decoder as Transformers models: a base model and a causal language model that `generate` drives."""

import dataclasses
import inspect
from typing import Any, get_args

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from twofold.hf.cache import adopt_cache, cache_for, quantized_dtype
from twofold.hf.config import TwofoldConfig
from twofold.hf.inputs import read_attention_mask, read_documents
from twofold.kernels import Linear, QuantizedLinear
from twofold.models import Decoder, initialize
from twofold.spec import AttentionImplementation, ConfigError, ModelConfig, TwofoldError

CACHE_NAME = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
"""Transformers' name for the cache, as argument and in outputs: `cache` since 5.24. Our models take either name."""

_LOSS_OPTIONS = ("num_items_in_batch", "ignore_index", "shift_labels")


class TwofoldPreTrainedModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """What both models share: the config, how weights start, and that no pickle is read."""

    config_class = TwofoldConfig
    config: TwofoldConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - Transformers reads it from the class
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a model; see `PreTrainedModel.from_pretrained`. Weights come from safetensors only, never from pickles.

        Raises:
            TwofoldError: for `use_safetensors=False`.
        """
        if kwargs.setdefault("use_safetensors", True) is not True:
            raise TwofoldError("twofold models are loaded from safetensors only; leave use_safetensors out")
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model; see `PreTrainedModel.save_pretrained`.

        Raises:
            TwofoldError: for a model with int8 weights.
        """
        if any(isinstance(module, QuantizedLinear) for module in self.modules()):
            raise TwofoldError(
                "a model with int8 weights is not saved; save it before quantize_weights, and call that after loading"
            )
        super().save_pretrained(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Does nothing: Transformers would copy this module into saved folders, which carry a stub already."""

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> str:
        """Transformers' own `attn_implementation` stays at its default: our `attention_implementation` chooses.

        Raises:
            ConfigError: for any other than `sdpa`, which would change nothing.
        """
        if attn_implementation not in (None, "sdpa"):
            raise ConfigError(
                f"attn_implementation '{attn_implementation}' is not for twofold models; leave it out, or set "
                f"attention_implementation to one of {', '.join(get_args(AttentionImplementation))}"
            )
        return "sdpa"

    @property
    def spec(self) -> ModelConfig:
        """The model's description."""
        return self.config.spec

    def _init_weights(self, module: nn.Module) -> None:
        initialize(module, self.config.spec)

    def _initialize_weights(self, module: nn.Module, *_: Any) -> None:
        """Initialises a module as if it were Transformers' own.

        In other people's models it skips modules without parameters of their own, such as our attention, whose output
        matrix starts smaller. It does so for fear of overwriting loaded weights; `initialize` goes through
        torch.nn.init, which Transformers guards against that.
        """
        super()._initialize_weights(module)


class TwofoldModel(TwofoldPreTrainedModel):  # type: ignore[no-untyped-call]
    """The decoder without its output matrix: hidden states after the final norm."""

    def __init__(self, config: TwofoldConfig) -> None:
        super().__init__(config)
        self.decoder = Decoder(config.spec)
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.decoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding, for example by one for more tokens."""
        assert isinstance(value, nn.Embedding)
        self.decoder.embed_tokens = value
        self.decoder.config = dataclasses.replace(self.decoder.config, vocab_size=value.num_embeddings)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int[Tensor, "#B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T C"] | None = None,
        use_cache: bool | None = None,
        *,
        cache: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Hidden states of the new tokens.

        Args:
            input_ids: New tokens.
            attention_mask: 1 for real tokens and 0 for padding, (B, S) over the cached and the new tokens; or a mask
                (B or 1, H or 1, T, S) that replaces causality, boolean (True = sees) or additive.
            position_ids: Positions of the new tokens. Default: counted over the real tokens. Where neither a mask nor
                a cache is given, a position that does not follow the one before it begins another document, which
                sees nothing of the earlier ones, and no cache is made.
            past_key_values: The cache, under the name that Transformers used until 5.23.
            inputs_embeds: Embeddings in place of `input_ids`.
            use_cache: Make a cache if none is given. Default: `config.use_cache`, and never while training.
            cache: The cache, under its name since Transformers 5.24.
            output_attentions: Refused: the attention weights are never made.
            output_hidden_states: Return the embeddings and what each block gives, the last after the final norm.
            return_dict: False for a plain tuple. Default: `config.return_dict`.

        Raises:
            TwofoldError: for inputs that contradict each other or the model; the message says which.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise TwofoldError(
                "output_attentions: attention weights are never written out here; "
                "compute them from the hidden states, or leave it out"
            )
        inputs = _the_one("input_ids", input_ids, "inputs_embeds", inputs_embeds)
        if inputs is None:
            raise TwofoldError("give input_ids or inputs_embeds")
        cache = _the_one("past_key_values", past_key_values, "cache", cache)
        embedded = self.decoder.embed_tokens(inputs) if inputs is input_ids else inputs
        documents = None
        if position_ids is not None:
            position_ids = position_ids.expand(embedded.shape[0], -1)  # (B, T)
            if attention_mask is None and cache is None:
                documents = read_documents(position_ids)
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        use_cache = use_cache and self.spec.causal
        if cache is None and use_cache and documents is None:  # what follows packed documents could not tell them apart
            cache = DynamicCache()
        storage = None if cache is None else adopt_cache(cache, self.config.spec)
        num_past = 0 if storage is None else storage[0].num_tokens
        padding, custom_mask = read_attention_mask(attention_mask, embedded, num_past)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        with _Recorder(self.decoder, bool(output_hidden_states)) as recorder:
            hidden_states = self.decoder(
                embedded,
                positions=position_ids,
                padding=padding,
                documents=documents,
                custom_mask=custom_mask,
                cache=storage,
            )
        recorded = (*recorder.hidden_states, hidden_states) if output_hidden_states else None
        named_cache: dict[str, Any] = {CACHE_NAME: cache}
        output = BaseModelOutputWithPast(last_hidden_state=hidden_states, hidden_states=recorded, **named_cache)
        return output if _wants_dict(self.config, return_dict) else output.to_tuple()


class TwofoldForCausalLM(TwofoldPreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model with shared projections, for `generate`, pipelines and the Trainer.

    Whatever cache `generate` makes or is given holds one tensor a token in layers with K = V.

    Raises:
        ConfigError: for a config that is not causal.
    """

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True  # the Trainer then says how many targets the whole batch has

    def __init__(self, config: TwofoldConfig) -> None:
        super().__init__(config)
        if not config.spec.causal:
            raise ConfigError("a causal language model needs causal: true; this config has causal: false")
        self.model = TwofoldModel(config)
        self.lm_head = Linear(config.spec.hidden_size, config.spec.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def fold_queries(self) -> None:
        """Turns a model trained with `query_depth=2` into the equal one with a single query matrix, in place."""
        self.model.decoder.fold_queries()
        self.config.query_depth = 1

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the token embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The output matrix."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the output matrix."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "..."] | None = None,
        position_ids: Int[Tensor, "#B T"] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Float[Tensor, "B T C"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Int[Tensor, "K"] = 0,
        *,
        cache: Cache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next token, and the loss where labels are given; see `TwofoldModel.forward`.

        Args:
            input_ids: New tokens.
            attention_mask: Padding, or a whole mask.
            position_ids: Positions of the new tokens.
            past_key_values: The cache, under its name until Transformers 5.23.
            inputs_embeds: Embeddings in place of `input_ids`.
            labels: Token that each position should predict next once shifted by one; -100 to leave one out.
            use_cache: Make a cache if none is given.
            logits_to_keep: Compute logits for this many last tokens, or for the positions listed; 0 for all.
            cache: The cache, under its name since Transformers 5.24.
            output_attentions: Refused.
            output_hidden_states: Return the states of every block.
            return_dict: False for a plain tuple.
            kwargs: What the loss takes besides: `num_items_in_batch`, `ignore_index`, `shift_labels`.
        """
        for name in kwargs:
            if name not in _LOSS_OPTIONS:
                raise TypeError(f"forward() got an unexpected keyword argument '{name}'")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.lm_head.out_features, **kwargs)
        named_cache: dict[str, Any] = {CACHE_NAME: outputs.get(CACHE_NAME)}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=outputs.hidden_states, **named_cache)
        return output if _wants_dict(self.config, return_dict) else output.to_tuple()

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Adopts the cache before generation asks whether it can be compiled, or to keep what assistants take back.

        A growing cache is told how many tokens will come at most, so that it seldom moves.
        What Transformers calls the quantized cache is made here: its own stores floats besides, and needs a backend.
        """
        is_ours = generation_config.cache_implementation == "quantized" and generation_config.use_cache is not False
        if is_ours and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = cache_for(self, quantized_dtype(generation_config.cache_config))
        else:
            super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        cache = model_kwargs.get(CACHE_NAME)
        if cache is not None:
            for layer_cache in adopt_cache(cache, self.config.spec):
                layer_cache.expected_tokens = max_cache_length
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Refuses: paged caches hold keys and values of Transformers' own attention."""
        raise TwofoldError("continuous batching (generate_batch) works with paged caches only; use generate")

    def _get_static_cache_init_shape(self) -> None:
        """None: our layers take their memory themselves, in shapes that Transformers does not know."""


class _Recorder:
    """Notes what goes into each block while it is open; a hook, because the decoder returns the end result only."""

    def __init__(self, decoder: Decoder, record: bool) -> None:
        self.hidden_states: list[Tensor] = []
        self._blocks = list(decoder.layers) if record else []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> "_Recorder":
        self._hooks = [
            block.register_forward_pre_hook(lambda _, inputs: self.hidden_states.append(inputs[0]))
            for block in self._blocks
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()


def _the_one(first_name: str, first: Any, second_name: str, second: Any) -> Any:
    if first is not None and second is not None:
        raise TwofoldError(f"give {first_name} or {second_name}, not both")
    return second if first is None else first


def _wants_dict(config: TwofoldConfig, return_dict: bool | None) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)
