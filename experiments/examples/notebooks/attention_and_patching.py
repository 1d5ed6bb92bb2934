# %% [markdown]
# # Attention and activation patching
#
# What happens inside a Transformer, and which part of it causes what? This notebook trains a small
# translator, reads its intermediate values, and then **replaces** them: a head is switched off, a
# value of one sentence is put into another. If the translation changes, that part was needed.
#
# `jaxformer` gives each intermediate value a name. Three functions are enough: `tap_names` lists
# the names, `read_taps` reads values, and `Patched` is the model with other values at some names.

# %%
# %matplotlib inline
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxformer as jf
from experiments.examples import alignment_heads
from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from experiments.harness.results import plots
from jaxformer.text.tokenizers import train_words

# %% [markdown]
# ## 1. A small translator
#
# The toy language is that of `transformer_step_by_step`. The model has two layers with four heads
# in the encoder and in the decoder.

# %%
pairs = sentence_pairs(5_000, seed=0)
tokenizer = train_words([sentence for pair in pairs for sentence in pair], vocab_size=200)
source, target = encode_pairs(pairs, tokenizer)
config = jf.TransformerConfig(
    tokenizer.vocab_size,
    d_model=64,
    d_ff=128,
    num_heads=4,
    num_encoder_layers=2,
    num_decoder_layers=2,
)
model = jf.EncoderDecoder(config)

STEPS, HELD_OUT = 300, 500
optimizer = jf.make_optimizer(
    jf.OptimizerConfig(learning_rate=3e-3, schedule="cosine", warmup_steps=100, total_steps=STEPS)
)
update = jax.jit(jf.make_train_step(jf.seq2seq_loss(model, pad=jf.PAD), optimizer))
params = jax.jit(model.init)(jax.random.key(0), source[:2], target[:2])["params"]
state = jf.init_train_state(params, optimizer, jax.random.key(1))
for step in range(STEPS):
    rows = np.random.default_rng(step).integers(HELD_OUT, len(source), 64)
    batch = jf.PairBatch.create(source[rows], target[rows], vocab_size=config.vocab_size)
    state, metrics = update(state, batch)
params = state.params
print(f"loss per word {float(metrics['loss'] / metrics['tokens']):.3f}")


def translate(model, *lines):
    """The best translation of each line."""
    return jf.translate(jf.Loaded(model, params, tokenizer), lines)


DOG, CAT = "the man can see the dog", "the man can see the cat"
for line, translation in zip([DOG, CAT], translate(model, DOG, CAT), strict=True):
    print(f"{line}  =  {translation}")

# %% [markdown]
# ## 2. Names of values
#
# A name is the path of a module and a word for the value. In a block the vectors of the words pass
# through three parts; after each of them they are the *residual stream*.

# %%
names = jf.tap_names(model)
print(len(names), "names, such as")
for name, shape in names.items():
    if name.startswith("decoder/blocks_1"):
        print(f"  {name:46} {shape.shape}")

# %% [markdown]
# `read_taps` returns what the model returns, and the values of the names asked for. It is a pure
# function: nothing is stored in the model, and inside `jax.jit` only what is asked for is kept.

# %%
translated = zip([DOG, CAT], translate(model, DOG, CAT), strict=True)
asked, answers = encode_pairs(list(translated), tokenizer)
inputs = answers[:, :-1]
WEIGHTS = [f"decoder/blocks_{layer}/cross_attention/weights" for layer in (0, 1)]
logits, values = jf.read_taps(model, params, asked, inputs, names=WEIGHTS)


def words(ids):
    """The tokens of `ids`."""
    return [tokenizer.token(int(i)).strip() for i in ids]


weights = np.stack([values[name][0] for name in WEIGHTS])  # [layers, heads, T, S]
plots.attention_grid(weights, words(inputs[0]), words(asked[0]))

# %% [markdown]
# ## 3. Without one head
#
# Each row is a word that is already written; the model looks for the next one. Head 2 of layer 1
# follows the translation word by word. But a picture shows where a head looks, not whether that
# matters. So we switch heads off, one at a time. Here is one: its output is set to zero.

# %%
HEADS = "decoder/blocks_1/cross_attention/heads"  # [B, T, heads, size]
without = jf.Patched(model, {HEADS: lambda x: x.at[:, :, 0].set(0.0)})
print(translate(without, DOG, CAT))

# %% [markdown]
# It is the same as a model whose output projection has zeros for that head:

# %%
pruned = jax.tree.map(jnp.copy, params)
kernel = pruned["decoder"]["blocks_1"]["cross_attention"]["out"]["kernel"]
pruned["decoder"]["blocks_1"]["cross_attention"]["out"]["kernel"] = kernel.at[0].set(0.0)
ours = without.apply({"params": params}, asked, inputs)
expected, _ = jf.read_taps(model, pruned, asked, inputs, names=[])
np.testing.assert_allclose(ours, expected, atol=1e-4)

# %% [markdown]
# A replacement may use traced arrays. So "which head" can be an argument, `jax.vmap` goes over all
# heads, and one compiled program measures everything.

# %%
KINDS = ["encoder {} attention", "decoder {} attention", "decoder {} cross_attention"]
PARTS = [kind.format(f"blocks_{layer}").replace(" ", "/") for kind in KINDS for layer in (0, 1)]
held_out = jf.PairBatch.create(source[:200], target[:200], vocab_size=config.vocab_size)
labels = jnp.asarray(held_out.target[:, 1:])


@jax.jit
@jax.vmap
def loss_with(keep):
    """The loss per word; head h of part p is multiplied by keep[p, h]."""
    scaled = {
        f"{part}/heads": lambda x, i=i: x * keep[i][None, None, :, None]
        for i, part in enumerate(PARTS)
    }
    patched = jf.Patched(model, scaled)
    pair = held_out.source, held_out.target[:, :-1], held_out.source != jf.PAD
    logits = patched.apply({"params": params}, *pair)
    total, tokens = jf.cross_entropy(logits, labels, labels != jf.PAD)
    return total / tokens


heads = len(PARTS) * config.num_heads
one_off = 1.0 - jnp.eye(heads).reshape(heads, len(PARTS), -1)
everything = loss_with(jnp.ones((1, len(PARTS), config.num_heads)))[0]
rise = (loss_with(one_off) - everything).reshape(len(PARTS), -1)

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
shown = axes.imshow(rise, cmap="Reds", vmin=0.0)
axes.set(xlabel="head", xticks=range(config.num_heads), title="rise of the loss without a head")
axes.set_yticks(range(len(PARTS)), [part.replace("blocks_", "layer ") for part in PARTS])
figure.colorbar(shown)
plt.show()
# %% [markdown]
# ## 4. Heads that align words
#
# Does a head of the cross-attention matter because of *where* it looks? Two more replacements
# answer that. With uniform weights the head looks at all words alike. With one-hot weights it looks
# only at its favourite word. If the first hurts and the second does not, the head aligns words.

# %%
loss, effects = alignment_heads.measure(model, params, held_out)
print(f"loss {loss:.3f} nats per word; it rises by")
print("\n".join(alignment_heads.table(effects)))

# %% [markdown]
# The head of the picture is the one that the model needs, and its favourite word is all it needs.
# `experiments/examples/alignment_heads.py` makes this table of any translation model.
#
# ## 5. Activation patching
#
# The two sentences differ in one word: dog and cat. German shows it in the article already: "den"
# Hund, "die" Katze. We take the model on the sentence with the **cat**, and put single values of
# the sentence with the **dog** into it. How much of the difference of "den" to "die" comes back?

# %%
place = next(t for t in range(len(answers[0])) if answers[0, t] != answers[1, t]) - 1
DEN, DIE = int(answers[0, place + 1]), int(answers[1, place + 1])
print("after", words(inputs[0, : place + 1]), "comes", words([DEN, DIE]))


def preference(logits):
    """How much more likely "den" is than "die" at that place, as a difference of logits."""
    return logits[0, place, DEN] - logits[0, place, DIE]


dog, cat = asked[:1], asked[1:]
same = inputs[1:]
clean, values = jf.read_taps(model, params, dog, same)
corrupted = model.apply({"params": params}, cat, same)
print(f"dog {preference(clean):.1f}, cat {preference(corrupted):.1f}")

# %% [markdown]
# The values are those of the residual stream: after each part of each layer, at each word. One that
# brings the whole difference back carries all that is needed from there on.

# %%
ENCODER = [
    "input",
    *(f"blocks_{i}/after_{x}" for i in (0, 1) for x in ("attention", "feed_forward")),
]
SUBLAYERS = ("attention", "cross_attention", "feed_forward")
DECODER = ["input", *(f"blocks_{i}/after_{x}" for i in (0, 1) for x in SUBLAYERS)]


def restored(name, spot):
    """The share of the difference that the dog's value at `name`, at one word, brings back."""
    patched = jf.Patched(model, {name: lambda x: x.at[:, spot].set(values[name][:, spot])})
    logits = patched.apply({"params": params}, cat, same)
    low, high = preference(corrupted), preference(clean)
    return (preference(logits) - low) / (high - low)


figure, panels = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for axes, stack, stream, ids in zip(
    panels, ("encoder", "decoder"), (ENCODER, DECODER), (dog[0], same[0]), strict=True
):
    spots = jnp.arange(len(ids))
    shares = [jax.jit(jax.vmap(partial(restored, f"{stack}/{name}")))(spots) for name in stream]
    shown = axes.imshow(np.stack(shares), cmap="RdBu", vmin=-1.0, vmax=1.0, aspect="auto")
    axes.set_xticks(spots, words(ids), rotation=60, ha="right")
    axes.set_yticks(range(len(stream)), stream)
    axes.set_title(f"{stack}: share that comes back")
figure.colorbar(shown)
plt.show()

# %% [markdown]
# In the encoder it stays with the noun, in every layer: that is where the decoder reads it. In the
# decoder it is nowhere until the cross-attention of layer 1 fetches it, before the article.
#
# A value replaced by itself changes nothing, not one bit:

# %%
own = {name: lambda x, value=value: value for name, value in values.items()}
again = jf.Patched(model, own).apply({"params": params}, dog, same)
assert np.array_equal(again, clean)

# %% [markdown]
# ## 6. Another translation
#
# The patched model also translates, with beam search and a cache. It reads "the man can see the
# cat"; the encoder's output is that of the sentence with the dog, at one word or at all words.

# %%
output = values["encoder/output"]
noun = words(dog[0]).index("dog")
one_word = jf.Patched(model, {"encoder/output": lambda x: x.at[:, noun].set(output[0, noun])})
length = output.shape[1]
all_words = jf.Patched(model, {"encoder/output": lambda x: x.at[:, :length].set(output[0])})
print("unchanged     ", translate(model, CAT))
print("one word      ", translate(one_word, CAT))
print("all words     ", translate(all_words, CAT))
assert translate(all_words, CAT) == translate(model, DOG)

# %% [markdown]
# ## 7. Which word decides?
#
# Values can have gradients. Add a zero to the encoder's input, and take the gradient of the
# preference with respect to that zero: its size at each word says how much that word matters.


# %%
@jax.jit
@jax.grad
def sensitivity(added):
    """The gradient of the preference with respect to what is added to the encoder's input."""
    patched = jf.Patched(model, {"encoder/input": lambda x: x + added})
    return preference(patched.apply({"params": params}, dog, same))


sizes = jnp.linalg.norm(sensitivity(jnp.zeros_like(values["encoder/input"]))[0], axis=-1)
figure, axes = plt.subplots(figsize=(6, 2.2), layout="constrained")
axes.bar(range(len(sizes)), sizes)
axes.set_xticks(range(len(sizes)), words(dog[0]), rotation=60, ha="right")
axes.set_title('"den" or "die": how much each word matters')
plt.show()
# %% [markdown]
# ## 8. After each layer
#
# The logit lens: what would the model say if the decoder ended after an earlier layer? The residual
# stream after layer 0 takes the place of the one after layer 1.

# %%
early = values["decoder/blocks_0/after_feed_forward"]
lens = jf.Patched(model, {"decoder/blocks_1/after_feed_forward": lambda _: early})
said = lens.apply({"params": params}, dog, same)
print("after layer 0:", words(said[0].argmax(axis=-1)))
print("after layer 1:", words(clean[0].argmax(axis=-1)))

# %% [markdown]
# ## Exercise
#
# Patch the `weights` of single heads instead of vectors. Which heads carry the gender? One is
# enough if the translation changes with it alone, and does not when all others are patched.
#
# ## What to do next
#
# - Do the same with a run of your own: `jf.load("runs/translation/grammar")` gives its model.
