"""Other people's weights: folders as `transformers` writes them, read and written.

Each family is one table of rows *our path <-> their name, transform* that is read in both
directions, and one list of settings that maps its config.json likewise. Tables take numpy arrays
and give numpy arrays.
"""

from jaxformer.pretrained.conventions import Conventions, load_conventions, load_ends
from jaxformer.pretrained.loading import Pretrained, load_pretrained, load_target_tokenizer
from jaxformer.pretrained.saving import save_pretrained

__all__ = [
    "Conventions",
    "Pretrained",
    "load_conventions",
    "load_ends",
    "load_pretrained",
    "load_target_tokenizer",
    "save_pretrained",
]
