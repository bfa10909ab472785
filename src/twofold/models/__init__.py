"""Plain torch modules: blocks and the models made of them. No trainer, no Transformers."""

from twofold.models.blocks import MLP, Block, initialize
from twofold.models.decoder import Decoder, LanguageModel

__all__ = ["MLP", "Block", "Decoder", "LanguageModel", "initialize"]
