# %% [markdown]
# # From static to contextual embeddings
#
# word2vec gives each word one vector, the same in every sentence. A Transformer gives a word a
# vector that depends on its sentence. This notebook trains both on the same text and looks at
# "bank", which is the bank of a river or a bank with money.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxformer as jf
from experiments.harness.results.plots import COLORS
from jaxformer.text.tokenizers import MASKED_SPECIAL_TOKENS, train_words

# %% [markdown]
# ## The text
#
# 4,000 sentences, half about rivers, half about money. "bank" occurs in both. "shore" is another
# word for the one sense, "office" for a place with the other, so we can see which sense a vector
# is near.

# %%
WORDS = {
    "start": "write a poem about|tell me about|we saw|she knows",
    "person": "man|woman|child|friend",
    "outside": "fishing|swimming|walking|resting",
    "water": "river|lake|water",
    "things": "fish|boat|tree",
    "river_place": "bank|shore",
    "business": "withdrawing|depositing|saving|borrowing",
    "money": "money|cash|coins",
    "papers": "loan|account|deposit",
    "money_place": "bank|office",
}
RIVER = (
    "{start} a {person} {outside} on a river {river_place}",
    "the {things} is near the {water} at the {river_place}",
    "{start} a {things} on the {river_place} of the {water}",
)
MONEY = (
    "{start} a {person} {business} {money} from a {money_place}",
    "the {papers} of the {person} is at the {money_place}",
    "the {money_place} keeps the {money} and the {papers}",
)
rng = np.random.default_rng(0)


def sentence(templates):
    """A random template, filled with random words."""
    words = {name: rng.choice(choices.split("|")) for name, choices in WORDS.items()}
    return str(rng.choice(templates)).format(**words)


sentences = [sentence(templates) for _ in range(2_000) for templates in (RIVER, MONEY)]
tokenizer = train_words(sentences, 100, special_tokens=MASKED_SPECIAL_TOKENS)
ids = [tokenizer.encode(text) for text in sentences]
print("\n".join(sentences[:6]))
print("vocabulary:", tokenizer.vocab_size)

# %% [markdown]
# ## Static vectors: skip-gram
#
# Skip-gram ([Mikolov et al. 2013](https://arxiv.org/abs/1301.3781)) predicts from a word the words
# around it. Each word has a vector `u`, and a second vector `v` as a neighbour. The probability of
# the neighbour `c` of word `w` is softmax over all words of `u_w . v_c`. Words with the same
# neighbours get similar vectors.
#
# We count how often each pair is at most 4 words apart. With so few words the softmax over all of
# them is cheap; word2vec samples a few wrong neighbours instead, because it has a million words.

# %%
WINDOW = 4
V = tokenizer.vocab_size
pairs = np.zeros((V, V))
for words in ids:
    for place, word in enumerate(words):
        for neighbour in words[max(0, place - WINDOW) : place] + words[place + 1 :][:WINDOW]:
            pairs[word, neighbour] += 1


def skip_gram_loss(vectors):
    """The mean of -log p(neighbour | word) over all pairs."""
    log_p = jax.nn.log_softmax(vectors["word"] @ vectors["neighbour"].T)
    return -jnp.sum(pairs * log_p) / pairs.sum()


@jax.jit
def train_skip_gram(vectors):
    """The vectors after 500 updates, and the loss before each."""
    optimizer = optax.adam(0.03)

    def update(carry, _):
        vectors, state = carry
        loss, gradient = jax.value_and_grad(skip_gram_loss)(vectors)
        changes, state = optimizer.update(gradient, state)
        return (optax.apply_updates(vectors, changes), state), loss

    (vectors, _), losses = jax.lax.scan(update, (vectors, optimizer.init(vectors)), length=500)
    return vectors, losses


start = {name: rng.normal(scale=0.1, size=(V, 16)) for name in ("word", "neighbour")}
vectors, losses = train_skip_gram(start)
static = np.asarray(vectors["word"])
print(f"loss {losses[0]:.2f} at the start, {losses[-1]:.2f} at the end")

# %% [markdown]
# The nearest words are those with similar neighbours. "bank" has neighbours of both kinds.


# %%
def cosine(a, b):
    """The cosine of the angle between vectors [..., D]; they broadcast."""
    return np.sum(a * b, axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def word_id(word):
    """The id of a word."""
    (index,) = tokenizer.encode(word)
    return index


def neighbours(word, count=5):
    """The words whose static vectors have the greatest cosine with that of `word`."""
    similar = cosine(static, static[word_id(word)])
    order = [i for i in np.argsort(-similar) if i >= len(MASKED_SPECIAL_TOKENS)]
    return [f"{tokenizer.token(int(i)).strip()} {similar[i]:.2f}" for i in order[1 : count + 1]]


for name in ("fishing", "money", "shore", "office", "bank"):
    print(f"{name:8}", ", ".join(neighbours(name)))

# %% [markdown]
# ## Contextual vectors: a small BERT
#
# The same sentences train an encoder. Some words of each sentence are hidden, and the model
# predicts them from the rest: 80 % become `<mask>`, 10 % another word, 10 % stay ([Devlin et al.
# 2019](https://arxiv.org/abs/1810.04805)).

# %%
rows = [[jf.BOS, *words, jf.EOS] for words in ids]
length = max(map(len, rows))
tokens = np.array([row + [jf.PAD] * (length - len(row)) for row in rows], np.int32)
MASK = MASKED_SPECIAL_TOKENS.index("<mask>")
HIDDEN = 2  # words of each sentence


def masked_batch(rng, tokens):
    """A batch in which `HIDDEN` words of each row are to be predicted."""
    real = tokens >= len(MASKED_SPECIAL_TOKENS)
    places = np.argsort(np.where(real, rng.random(tokens.shape), 2.0), axis=1)[:, :HIDDEN]
    labels = np.take_along_axis(tokens, places, axis=1)
    fate = rng.random(places.shape)
    other = rng.integers(len(MASKED_SPECIAL_TOKENS), V, places.shape)
    shown = np.where(fate < 0.8, MASK, np.where(fate < 0.9, other, labels))
    hidden = tokens.copy()
    np.put_along_axis(hidden, places, shown.astype(np.int32), axis=1)
    return jf.MaskedBatch(
        tokens=hidden,
        padding_mask=tokens != jf.PAD,
        token_type_ids=np.zeros_like(tokens),
        masked_positions=places.astype(np.int32),
        labels=labels,
        loss_mask=np.ones(places.shape, bool),
        example_ids=np.arange(len(tokens), dtype=np.int32),
        next_sentence=np.zeros(len(tokens), np.int32),
    )


# %%
STEPS = 300
config = jf.TransformerConfig(V, d_model=32, d_ff=64, num_heads=4, num_encoder_layers=2)
model = jf.MaskedLanguageModel(config)
params = jax.jit(model.init)(jax.random.key(0), tokens[:2])["params"]
settings = jf.OptimizerConfig(
    schedule="cosine", learning_rate=5e-3, warmup_steps=50, total_steps=STEPS
)
optimizer = jf.make_optimizer(settings)
step = jax.jit(jf.make_train_step(jf.masked_loss(model), optimizer))
state = jf.init_train_state(params, optimizer, jax.random.key(1))
for number in range(STEPS):
    chosen = tokens[rng.integers(0, len(tokens), 64)]
    state, metrics = step(state, masked_batch(rng, chosen))
    if number % 100 == 0 or number == STEPS - 1:
        print(f"step {number:3} loss {metrics['loss'] / metrics['tokens']:.2f}")

# %% [markdown]
# The model can use the sentence. For the same hidden word it gives different answers:

# %%
questions = [
    "write a poem about a man fishing on a river <mask>",
    "write a poem about a man withdrawing money from a <mask>",
]
loaded = jf.Loaded(model, state.params, tokenizer)
filled = jf.fill_mask(loaded, questions, count=3, details=True)
for text, (answers,) in zip(questions, filled, strict=True):
    print(text, "->", ", ".join(f"{one.text.strip()} {one.probability:.0%}" for one in answers))

# %% [markdown]
# ## One word, two vectors
#
# The table of the model has one row for "bank", as skip-gram has: the *learned* embedding. After
# the blocks the vector is *contextual*: attention has added what the other words say.

# %%
texts = [
    "write a poem about a man fishing on a river bank",
    "write a poem about a man withdrawing money from a bank",
]
river, money = jf.embed(loaded, texts, details=True)
by_river, by_money = (one.tokens.index(" bank") for one in (river, money))
print("learned,    river:", river.learned[by_river][:5].round(2))
print("learned,    money:", money.learned[by_money][:5].round(2))
print("contextual, river:", river.contextual[by_river][:5].round(2))
print("contextual, money:", money.contextual[by_money][:5].round(2))
assert np.array_equal(river.learned[by_river], money.learned[by_money])

# %% [markdown]
# ## A picture in two dimensions
#
# The two directions in which the vectors differ most (principal components) make a picture. On the
# left each word has one static vector: "bank" lies between the river words and the money words. On
# the right are contextual vectors of words in sentences. "bank" is two groups now, and each lies
# with its own kind.

# %%
GROUPS = {
    "river": ("river", "water", "fish", "shore", "fishing"),
    "money": ("money", "loan", "office", "saving"),
}


def principal_components(vectors):
    """The first two principal components [N, 2] of vectors [N, D]."""
    centered = vectors - vectors.mean(axis=0)
    _, _, directions = np.linalg.svd(centered, full_matrices=False)
    return centered @ directions[:2].T


def draw(axes, points, names, colors):
    """Dots with their names."""
    axes.scatter(*points.T, c=colors, s=30)
    for point, name in zip(points, names, strict=True):
        axes.annotate(name, point, xytext=(4, 3), textcoords="offset points", fontsize=8)
    axes.margins(0.12)
    axes.set(xticks=[], yticks=[])


names = [*GROUPS["river"], *GROUPS["money"]]
colors = [COLORS[0]] * len(GROUPS["river"]) + [COLORS[1]] * len(GROUPS["money"])

# %% [markdown]
# In a sentence a word has a vector of its own. We take the mean of each word over the sentences of
# its kind, and "bank" in single sentences of both kinds.

# %%
found = jf.embed(loaded, sentences[:400], details=True)
by_kind = {"river": found[::2], "money": found[1::2]}


def contextual(word, kind):
    """The vectors of `word` in the sentences of a kind."""
    token = f" {word}"
    return np.stack(
        [one.contextual[one.tokens.index(token)] for one in by_kind[kind] if token in one.tokens]
    )


means = {word: contextual(word, kind).mean(axis=0) for kind in GROUPS for word in GROUPS[kind]}
banks = {kind: contextual("bank", kind)[:20] for kind in GROUPS}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
points = principal_components(static[[word_id(name) for name in [*names, "bank"]]])
draw(left, points, [*names, "bank"], [*colors, "black"])
left.set_title("static vectors (skip-gram)")

points = principal_components(np.concatenate([list(means.values()), *banks.values()]))
draw(right, points[: len(names)], names, colors)
for number, (kind, crosses) in enumerate(
    zip(banks, np.split(points[len(names) :], 2), strict=True)
):
    right.scatter(*crosses.T, marker="x", color=COLORS[number], label=f'"bank" in {kind} sentences')
right.set_title("contextual vectors (last hidden states)")
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Three ways to compare vectors
#
# - **Euclidean distance**: the length of the straight line between two points. Small means similar.
# - **Cosine**: only the angle counts, from -1 to 1. Two vectors in the same direction have the
#   cosine 1, however different their lengths are.
# - **Dot product**: the cosine times both lengths. It needs no square roots and no division, and
#   it is one matrix product for all pairs. This is why attention uses it.


# %%
def compare(name, a, b):
    """Prints the three measures."""
    distance = np.linalg.norm(a - b)
    print(f"{name:32} {distance:9.2f} {cosine(a, b):8.2f} {a @ b:8.2f}")


shore, office = means["shore"], means["office"]
by_river, by_money = banks["river"].mean(axis=0), banks["money"].mean(axis=0)
bank = static[word_id("bank")]

print(f"{'':32} {'Euclidean':>9} {'cosine':>8} {'dot':>8}")
compare("static     bank, shore", bank, static[word_id("shore")])
compare("static     bank, office", bank, static[word_id("office")])
compare("contextual bank (river), shore", by_river, shore)
compare("contextual bank (river), office", by_river, office)
compare("contextual bank (money), shore", by_money, shore)
compare("contextual bank (money), office", by_money, office)

# %% [markdown]
# All three agree here: in a river sentence "bank" is nearer to "shore", in a money sentence nearer
# to "office". They need not agree. A vector twice as long has the same cosine, twice the dot
# product and another distance:

# %%
print(f"{'':32} {'Euclidean':>9} {'cosine':>8} {'dot':>8}")
compare("shore, shore", shore, shore)
compare("shore, 2 x shore", shore, 2 * shore)

assert cosine(by_river, shore) > cosine(by_river, office)
assert cosine(by_money, office) > cosine(by_money, shore)

# %% [markdown]
# ## With a real model
#
# `jf.embed` gives both vectors of each token for a run of this project, or for the folder of a
# model of `transformers`, such as DistilBERT's: compare "bank" in "Write a poem about a man fishing
# on a river bank." and in "Write a poem about a man withdrawing money from a bank."
#
# ## Exercise
#
# Add a third sense to the text, such as a bank of clouds, with three sentences of its own. Where
# does its "bank" stand in the picture? And how few sentences are enough for the contextual vectors
# to keep it apart?
