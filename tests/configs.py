"""Small configurations: sizes that all differ, so that no axis is taken for another one."""

from typing import Any

from jaxformer.config import TransformerConfig, with_fields

_SMALL = TransformerConfig(vocab_size=17, d_model=12, d_ff=13, num_heads=3, max_len=11)


def changed(config: Any, **changes: Any) -> Any:
    """`config` with fields of its parts, such as optimizer__total_steps=7."""
    return with_fields(config, {name.replace("__", "."): x for name, x in changes.items()})


def small(**changes: Any) -> TransformerConfig:
    """A small model's config with `changes`, such as norm__placement="pre"."""
    return changed(_SMALL, **changes)
