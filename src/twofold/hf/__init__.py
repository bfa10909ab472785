"""Our models in Transformers: `from_pretrained`, `generate`, pipelines and the Trainer, with the smaller cache.

The only room that knows Transformers' models. The config wraps the spec's dataclass, the models wrap the plain modules,
and whatever cache Transformers makes is filled with ours. Importing this room registers the models with the Auto
classes.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from twofold.hf.cache import TwofoldCacheLayer, adopt_cache, cache_for, cache_sizes
from twofold.hf.config import TwofoldConfig
from twofold.hf.folders import load_model, save_model, to_hf, to_plain, wrap_tokenizer
from twofold.hf.llama import from_llama
from twofold.hf.modeling import CACHE_NAME, TwofoldForCausalLM, TwofoldModel, TwofoldPreTrainedModel

AutoConfig.register(TwofoldConfig.model_type, TwofoldConfig, exist_ok=True)
AutoModel.register(TwofoldConfig, TwofoldModel, exist_ok=True)
AutoModelForCausalLM.register(TwofoldConfig, TwofoldForCausalLM, exist_ok=True)

__all__ = [
    "CACHE_NAME",
    "TwofoldCacheLayer",
    "TwofoldConfig",
    "TwofoldForCausalLM",
    "TwofoldModel",
    "TwofoldPreTrainedModel",
    "adopt_cache",
    "cache_for",
    "cache_sizes",
    "from_llama",
    "load_model",
    "save_model",
    "to_hf",
    "to_plain",
    "wrap_tokenizer",
]
