"""Mistakes that a type checker must report: each line with `# error` has exactly one."""

import jax
import jax.numpy as jnp

import jaxformer
from jaxformer import DecoderOnly, EncoderDecoder, SearchConfig, TransformerConfig

config = TransformerConfig(vocab_size="50", d_model=16, d_ff=32, num_heads=2)  # error
other = TransformerConfig(vocab_size=50, d_model=16, d_ff=32, heads=2)  # error
positions = TransformerConfig(
    vocab_size=50,
    d_model=16,
    d_ff=32,
    num_heads=2,
    positions="cosine",  # error
)
search = SearchConfig(beam_size="four")  # error
model = DecoderOnly(config, attention_fn="auto")  # error
name = jaxformer.Transformer  # error
source = jnp.ones((2, 3), jnp.int32)
logits: int = EncoderDecoder(config)(source, source)  # error
mask = jaxformer.AttentionMask(causal="yes")  # error
state: str = jaxformer.init_train_state({}, jaxformer.OptimizerConfig(), jax.random.key(0))  # error
batch = jaxformer.PairBatch(source, source)  # error
jaxformer.cross_entropy(model, source, source)  # error
loss: jaxformer.TrainState = jaxformer.causal_loss(model)  # error
jaxformer.seq2seq_loss(model, 0)  # error
devices = jaxformer.single(mesh="data=2")  # error
jaxformer.translate(["a line"], model, {}, None)  # error
heads = jaxformer.MultiHeadAttention(num_heads=2)(source, None, source > 0)  # error
loaded = jaxformer.load("run")
line: str = jaxformer.translate(loaded, "a line")
lines: list[str] = jaxformer.translate(loaded, ["a line"])
number: float = jaxformer.score(loaded, "a line")
one: str = jaxformer.translate(loaded, ["a line"])  # error
several: list[str] = jaxformer.complete(loaded, "a line")  # error
ids: list[int] = jaxformer.complete_with_details(loaded, "a line").ids
text: str = jaxformer.fill_mask_with_details(loaded, "a <mask>")  # error
