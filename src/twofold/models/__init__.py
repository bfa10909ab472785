"""Plain torch modules: blocks and the models made of them. No trainer, no Transformers."""

from twofold.models.blocks import MLP, Block, initialize
from twofold.models.decoder import Decoder, LanguageModel
from twofold.models.loss import next_token_loss

__all__ = ["MLP", "Block", "Decoder", "LanguageModel", "initialize", "next_token_loss"]
