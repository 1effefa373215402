"""Small architectures, each with what a rule could get wrong. `ZOO` maps names to them."""

from . import attention, convolution, dense, derived, embeddings, foreign, huggingface, layouts, norms, recurrent, ties
from .registry import ZOO, Architecture

__all__ = [
    "ZOO",
    "Architecture",
    "attention",
    "convolution",
    "dense",
    "derived",
    "embeddings",
    "foreign",
    "huggingface",
    "layouts",
    "norms",
    "recurrent",
    "ties",
]
