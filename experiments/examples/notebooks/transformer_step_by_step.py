# %% [markdown]
# # A Transformer step by step
#
# This notebook builds the Transformer of [Vaswani et al. 2017](https://arxiv.org/abs/1706.03762)
# from a table look-up to a model that translates. Each step is a few lines of JAX. After each step
# an `assert` shows that the lines give the same numbers as the module of `jaxformer`.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf
from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from experiments.harness.results import plots
from jaxformer.config.positions import positional_encoding
from jaxformer.nn.layers import Embedding, FeedForward, Norm
from jaxformer.ops.attention import reference
from jaxformer.text.tokenizers import train_words

# %% [markdown]
# ## 1. Words become numbers
#
# The toy language has 8 nouns, 6 verbs and a few other words. Its German has what makes
# translation hard: articles and adjectives change with gender and case, and some words move to
# another place.

# %%
pairs = sentence_pairs(5_000, seed=0)
for english, german in pairs[:5]:
    print(f"{english:45} {german}")

# %% [markdown]
# A tokenizer gives each word a number. Both languages share one vocabulary. Each sentence ends
# with `<eos>`, a translation begins with `<bos>`, and `<pad>` fills short rows up.

# %%
tokenizer = train_words([sentence for pair in pairs for sentence in pair], vocab_size=200)
source, target = encode_pairs(pairs, tokenizer)


def words(ids):
    """The tokens of `ids`, without padding."""
    return [tokenizer.token(int(i)).strip() for i in ids if i != jf.PAD]


print("vocabulary:", tokenizer.vocab_size)
print("source:", source[0], words(source[0]))
print("target:", target[0], words(target[0]))

# %% [markdown]
# ## 2. Numbers become vectors
#
# An embedding is a table with one row of D numbers for each of V words. The look-up reads rows. It
# equals a product with one-hot vectors, but does not multiply by all the zeros.

# %%
V, D = tokenizer.vocab_size, 64
rng = np.random.default_rng(0)
table = rng.normal(scale=D**-0.5, size=(V, D)).astype(np.float32)
sentence = source[0][source[0] != jf.PAD]


def embed(table, ids):
    """The rows of `table` that belong to `ids`, times sqrt(D)."""
    return jnp.take(table, ids, axis=0) * table.shape[1] ** 0.5


one_hot = jax.nn.one_hot(sentence, V)
np.testing.assert_allclose(one_hot @ table, jnp.take(table, sentence, axis=0), rtol=1e-6)
print("table", table.shape, "ids", sentence.shape, "vectors", embed(table, sentence).shape)

# %% [markdown]
# The factor sqrt(D) is from section 3.4 of the paper: it makes the vectors as large as the
# positions that are added next. The library's module does the same.


# %%
def assert_same(ours, expected):
    """Fails if two results differ by more than rounding."""
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


expected = Embedding(V, D).apply({"params": {"table": table}}, sentence)
assert_same(embed(table, sentence), expected)

# %% [markdown]
# ## 3. Vectors get positions
#
# Attention treats words as a set: without positions, "the man sees the dog" and "the dog sees the
# man" are the same. So each position has a vector of sines and cosines, and it is added to the
# word at that position. Slow and fast waves together are unique for each position, like the hands
# of a clock.


# %%
def positions(length, size):
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos of the same angle; [T, D]."""
    column = np.arange(size)
    angle = np.arange(length)[:, None] / 10_000 ** (column // 2 * 2 / size)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle))


print(positions(5, 3).round(2))
assert_same(positions(50, D), positional_encoding(50, D))
plots.position_table(positional_encoding(50, D))

# %% [markdown]
# The right picture compares positions: near ones are similar, whatever the position is. The paper
# chose sines because a step of `k` positions is the same rotation everywhere. One matrix moves
# every position by 3:


# %%
def shift(size, distance):
    """The matrix M with PE(pos + distance) = M PE(pos) for every pos: a rotation of each pair."""
    matrix = np.zeros((size, size))
    for i in range(0, size, 2):
        angle = distance / 10_000 ** (i / size)
        sin, cos = np.sin(angle), np.cos(angle)
        matrix[i : i + 2, i : i + 2] = [[cos, sin], [-sin, cos]]
    return matrix


waves = positions(50, D)
np.testing.assert_allclose(waves[:-3] @ shift(D, 3).T, waves[3:], atol=1e-9)

# %% [markdown]
# ## 4. Words look at each other
#
# Attention mixes the vectors of a sentence. It is easiest to understand in four steps. In each
# step the new vector of a word is a weighted sum over words, and only the weights change.
#
# 1. **Average.** All weights are equal.
# 2. **Dot product.** A word takes more from words that are similar to it. A softmax makes the
#    similarities positive, with the sum 1.
# 3. **Scale.** The product of two random vectors of size D has the standard deviation sqrt(D).
#    After division by it the softmax no longer chooses a single word.
# 4. **Projections.** Learned matrices make three vectors of each word: a query (what it looks for),
#    a key (what it offers) and a value (what it gives).


# %%
def attention(query, key, value, scale=None):
    """softmax(Q K^T scale) V for queries [T, H] and keys [S, H]; the scale is 1/sqrt(H)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    weights = jax.nn.softmax(query @ key.T * scale, axis=-1)
    return weights @ value, weights


H = 8  # in only 8 dimensions the differences are easy to see
x = (embed(table, sentence) + positions(len(sentence), D))[:, :H]
matrices = rng.normal(scale=H**-0.5, size=(2, H, H))

weights = {
    "1. average": attention(0 * x, x, x)[1],
    "2. dot product": attention(x, x, x, scale=1.0)[1],
    "3. scaled": attention(x, x, x)[1],
    "4. projected": attention(x @ matrices[0], x @ matrices[1], x)[1],
}
np.testing.assert_allclose(weights["1. average"], 1 / len(sentence), rtol=1e-6)

# %%
figure, panels = plt.subplots(1, 4, figsize=(10, 2.8), layout="constrained", sharey=True)
for axes, (name, matrix) in zip(panels, weights.items(), strict=True):
    plots.attention_map(axes, np.asarray(matrix), words(sentence), words(sentence))
    axes.set_title(name)

# %% [markdown]
# Each row is a word that looks, each column a word that is looked at, dark is a weight near 1. In
# step 2 most words see only themselves, because nothing is as similar to a word as the word
# itself. After scaling they see a little more of the others. Only projections let a word look for
# something else than itself. Here they are random; training will give them a meaning.
#
# Equation 1 of the paper, `softmax(Q K^T / sqrt(d_k)) V`, is now complete. The library calls the
# same function `reference`; it takes a batch and several heads at once.

# %%
query, key = x @ matrices[0], x @ matrices[1]
ours, _ = attention(query, key, x)
q, k, v = (part[None, :, None] for part in (query, key, x))  # [B, T, N, H]: one row, one head
assert_same(ours, reference(q, k, v, jf.AttentionMask(), scale=H**-0.5)[0, :, 0])

# %% [markdown]
# ## 5. Masks: who may look at whom
#
# A decoder writes from left to right, so in training a word must not look at the words after it.
# And no word should look at padding. A mask is a matrix with True where looking is allowed; the
# others get the score minus infinity, hence the weight 0.

# %%
causal = np.tril(np.ones((6, 6), bool))
padding = np.arange(6) < 4  # of six tokens the last two are padding
both = causal & padding

mask = jf.AttentionMask(causal=True, padding_mask=padding[None])
assert_same([[both]], mask.materialize(6, 6))

# %%
figure, panels = plt.subplots(1, 3, figsize=(7, 2.6), layout="constrained")
masks = {"causal": causal, "padding": np.tile(padding, (6, 1)), "both": both}
for axes, (name, matrix) in zip(panels, masks.items(), strict=True):
    plots.attention_map(axes, matrix, list("012345"), list("012345"))
    axes.set(title=name, xlabel="key", ylabel="query")

# %% [markdown]
# ## 6. Several heads
#
# One softmax can look for one thing. Several heads look for several things at once: each has its
# own small projections. Their results are put side by side and projected once more.
#
# From here on everything has a batch axis. The letters are B batch, T queries, S keys, N heads, H
# the size of a head.


# %%
def dense(params, x, axes=1):
    """A linear map over the last `axes` axes of `x`."""
    return jnp.tensordot(x, params["kernel"], axes) + params["bias"]


def multi_head_attention(params, x, memory, allowed):
    """What `x` [B, T, D] takes from `memory` [B, S, D], and the weights [B, N, T, S]."""
    query = dense(params["query"], x)  # [B, T, N, H]
    key, value = dense(params["key"], memory), dense(params["value"], memory)  # [B, S, N, H]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1)
    heads = jnp.einsum("bnts,bsnh->btnh", weights, value)
    return dense(params["out"], heads, axes=2), weights


# %% [markdown]
# The library's module makes the parameters. Ours reads them: parameters are a tree of arrays, and
# any function may use them.

# %%
batch = jnp.asarray(rng.normal(size=(2, 7, D)), jnp.float32)
allowed = jnp.tril(jnp.ones((7, 7), bool))
attention_module, mask = jf.MultiHeadAttention(num_heads=4), jf.AttentionMask(causal=True)
params = jax.jit(attention_module.init)(jax.random.key(0), batch, mask=mask)["params"]
for name, leaves in params.items():
    print(name, jax.tree.map(jnp.shape, leaves))

ours, _ = multi_head_attention(params, batch, batch, allowed)
assert_same(ours, attention_module.apply({"params": params}, batch, mask=mask))

# %% [markdown]
# ## 7. The block
#
# Attention moves information between words. A feed-forward network then works on each word alone.
# Around both there is a residual connection, `x + f(x)`, which lets gradients pass, and a norm,
# which keeps the vectors at one size.


# %%
def norm(params, x):
    """`x` with mean 0 and variance 1 in each vector, scaled and shifted."""
    centered = x - x.mean(axis=-1, keepdims=True)
    scaled = centered / jnp.sqrt(jnp.square(centered).mean(axis=-1, keepdims=True) + 1e-6)
    return scaled * params["scale"] + params["bias"]


def feed_forward(params, x):
    """Two linear maps with a ReLU between them."""
    return dense(params["down"], jax.nn.relu(dense(params["up"], x)))


for part, function in ((Norm(), norm), (FeedForward(d_ff=128), feed_forward)):
    params = jax.jit(part.init)(jax.random.key(0), batch)["params"]
    assert_same(function(params, batch), part.apply({"params": params}, batch))

# %% [markdown]
# A block of the encoder is attention and feed-forward. A block of the decoder has a second
# attention between them: its queries come from the translation, its keys and values from the
# encoded source.


# %%
def block(params, x, allowed, memory=None, memory_allowed=None):
    """One block; with `memory` it is one of the decoder. Also returns the cross-attention."""
    attended, weights = multi_head_attention(params["attention"], x, x, allowed)
    x = norm(params["attention_norm"], x + attended)
    if memory is not None:
        inputs = x, memory, memory_allowed
        attended, weights = multi_head_attention(params["cross_attention"], *inputs)
        x = norm(params["cross_attention_norm"], x + attended)
    x = norm(params["feed_forward_norm"], x + feed_forward(params["feed_forward"], x))
    return x, weights


encoder_block = jf.Block(num_heads=4, d_ff=128)
params = jax.jit(encoder_block.init)(jax.random.key(0), batch, mask)["params"]
expected, _ = encoder_block.apply({"params": params}, batch, mask)
assert_same(block(params, batch, allowed)[0], expected)

# %% [markdown]
# ## 8. Encoder and decoder
#
# The whole model: embed the source, apply the encoder's blocks, embed the target, apply the
# decoder's blocks. The table is used a third time at the end: the product of a vector with each
# row is the score of each word.


# %%
def transformer(params, source, target):
    """Scores [B, T, V] of the word after each of `target`, and each layer's cross-attention."""
    table = params["embedding"]["table"]

    def blocks(stack):
        return [stack[f"blocks_{i}"] for i in range(len(stack))]

    def embedded(ids):
        return embed(table, ids) + positions(ids.shape[1], table.shape[1])

    real = (source != jf.PAD)[:, None, None, :]
    memory = embedded(source)
    for layer in blocks(params["encoder"]):
        memory, _ = block(layer, memory, real)

    causal = jnp.tril(jnp.ones((target.shape[1],) * 2, bool))
    x, cross_attention = embedded(target), []
    for layer in blocks(params["decoder"]):
        x, weights = block(layer, x, causal, memory, real)
        cross_attention.append(weights)
    return x @ table.T, jnp.stack(cross_attention, axis=1)  # [B, T, V] and [B, layers, N, T, S]


config = jf.TransformerConfig(
    V, d_model=D, d_ff=128, num_heads=4, num_encoder_layers=2, num_decoder_layers=2
)
model = jf.EncoderDecoder(config)
start = jax.jit(model.init)(jax.random.key(0), source[:2], target[:2])["params"]
ours, _ = jax.jit(transformer)(start, source[:4], target[:4])
inputs = source[:4], target[:4], source[:4] != jf.PAD
assert_same(ours, jax.jit(model.apply)({"params": start}, *inputs))
print(f"{sum(leaf.size for leaf in jax.tree.leaves(start)):,} parameters")

# %% [markdown]
# ## 9. Training
#
# The loss of a word is minus the logarithm of its probability. The model sees the translation up
# to a word and predicts the next one, at all positions at once: this is why the causal mask is
# needed.


# %%
def mean_loss(params, source, target):
    """The mean loss of the words of `target` in nats; padding does not count."""
    logits, _ = transformer(params, source, target[:, :-1])
    labels = target[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(losses, where=labels != jf.PAD)


print(f"loss before training {jax.jit(mean_loss)(start, source[:64], target[:64]):.2f}")
print(f"loss of a guess      {np.log(V):.2f}")

# %% [markdown]
# An update is a function too: parameters and optimizer state go in, new ones come out. The
# learning rate rises for 100 updates and then falls. The first 500 pairs are held out: they are
# not shown in training.

# %%
STEPS, HELD_OUT = 300, 500
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 100, STEPS)
optimizer = optax.adam(schedule, b2=0.98)


@jax.jit
def update(params, state, source, target):
    loss, gradient = jax.value_and_grad(mean_loss)(params, source, target)
    changes, state = optimizer.update(gradient, state)
    return optax.apply_updates(params, changes), state, loss


params, state, losses = start, optimizer.init(start), []
for step in range(STEPS):
    rows = np.random.default_rng(step).integers(HELD_OUT, len(source), 64)
    params, state, loss = update(params, state, source[rows], target[rows])
    losses.append(float(loss))

held_out_loss = jax.jit(mean_loss)(params, source[:HELD_OUT], target[:HELD_OUT])
print(f"loss of sentences that were never shown: {held_out_loss:.4f}")

# %%
plots.learning_curves({"loss": {"training": [(range(STEPS), losses)]}})

# %% [markdown]
# ## 10. Translation
#
# The decoder starts from `<bos>`. The most probable next word is appended, and so on until
# `<eos>`.


# %%
def greedy(params, source, length):
    """The most probable word at each place, one after the other; [B, length]."""
    target = np.full((len(source), length), jf.PAD)
    target[:, 0] = jf.BOS
    step = jax.jit(transformer)
    for place in range(1, length):
        logits, _ = step(params, source, target)
        target[:, place] = logits[:, place - 1].argmax(axis=-1)
    return target


def text(ids):
    """The words of `ids` up to `<eos>`."""
    ids = [int(i) for i in ids[1:]]
    return tokenizer.decode(ids[: ids.index(jf.EOS)] if jf.EOS in ids else ids)


found = greedy(params, source[:HELD_OUT], target.shape[1])
right = [text(found[i]) == pairs[i][1] for i in range(HELD_OUT)]
print(f"translated exactly: {np.mean(right):.1%} of {HELD_OUT} held-out sentences")
for i in range(3):
    print(f"\nsource {pairs[i][0]}\nmodel  {text(found[i])}\nright  {pairs[i][1]}")
assert np.mean(right) > 0.9

# %% [markdown]
# The library reads the same parameters. It searches with several hypotheses (beam search) and
# keeps the keys and values of earlier words, so each word costs one step instead of a whole
# sentence.

# %%
asked = ["tomorrow the small woman must paint a white horse", "the big dog can hear a young bird"]
loaded = jf.Loaded(model, params, tokenizer)
translations = jf.translate(loaded, asked)
print(*translations, sep="\n")

# %% [markdown]
# ## 11. What the model looks at
#
# The cross-attention shows which English words the decoder reads. A row is a German word that is
# already written, and the model looks for the **next** one. In the second layer many heads follow
# the translation: at "die" they look at "small", at "kleine" at "woman", at "weißes" at "horse".

# %%
example = [(asked[0], translations[0])]
one_source, one_target = encode_pairs(example, tokenizer)
_, cross_attention = jax.jit(transformer)(params, one_source, one_target[:, :-1])
np.testing.assert_allclose(cross_attention.sum(axis=-1), 1.0, rtol=1e-5)
plots.attention_grid(cross_attention[0], words(one_target[0, :-1]), words(one_source[0]))

# %% [markdown]
# After "Pferd" comes "malen", but most heads look at `<eos>` there instead of "paint". The encoder
# has mixed the vectors of the whole sentence, so the vector at `<eos>` may hold the verb too.
# Attention shows where a model reads, not what it finds there.

# %% [markdown]
# ## Exercise
#
# Change the model: one head instead of four, no positions, one block. What does it lose first?
# Guess before you run it, and look at the attention again.
#
# ## What to do next
#
# - `python -m experiments.translation.train` trains the same model on more language, with dropout,
#   label smoothing, checkpoints and a report.
# - `functional_and_pytorch` compares this style with PyTorch's.
# - `attention_and_patching` reads and changes what happens inside a model.
