# %% [markdown]
# # The functional design and PyTorch's
#
# One Transformer, written twice: as a pure function of its parameters (`jaxformer`, JAX and Flax)
# and as an object that holds them ([torch_reference](../../torch_reference/README.md), PyTorch).
# Both compute the same numbers. What differs is where the state lives, and this decides what is
# easy.
#
# You need the extra `peers`: `pip install -e '.[notebooks,peers]'`.

# %%
# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.func import functional_call, grad, vmap

import jaxformer as jf
from experiments.examples.notebooks.toy_language import encode_pairs, sentence_pairs
from experiments.harness.results import plots
from experiments.torch_reference.transformer import Transformer
from experiments.torch_reference.weights import gradients_of, load_params
from jaxformer.text.tokenizers import train_words

# %% [markdown]
# ## The same model
#
# Sentences of the toy language, and one configuration for both models.

# %%
pairs = sentence_pairs(2_000, seed=0)
tokenizer = train_words([sentence for pair in pairs for sentence in pair], vocab_size=200)
source, target = encode_pairs(pairs, tokenizer)
config = jf.TransformerConfig(
    tokenizer.vocab_size,
    d_model=32,
    d_ff=64,
    num_heads=4,
    num_encoder_layers=1,
    num_decoder_layers=1,
    dropout_rate=0.1,
)
batch = jf.PairBatch.create(source[:8], target[:8], vocab_size=config.vocab_size)

# %% [markdown]
# In JAX the model is a description of a function. It holds no weights. `init` returns them as a
# tree of arrays, and every call takes them as an argument.

# %%
model = jf.EncoderDecoder(config)
params = jax.jit(model.init)(jax.random.key(0), batch.source, batch.target)["params"]
print(type(params).__name__, "with", len(jax.tree.leaves(params)), "arrays:", list(params))
print("model.params exists:", hasattr(model, "params"))

# %% [markdown]
# In PyTorch the model is an object. The weights are its attributes. A call needs only the input.

# %%
torch.manual_seed(0)
torch.set_num_threads(1)
reference = Transformer(config)
names = [name for name, _ in reference.named_parameters()]
print(type(reference).__name__, "with", len(names), "parameters:", names[:3], "...")

# %% [markdown]
# We copy the weights from the tree into the object. Now both give the same logits.

# %%
load_params(params, reference, config)
reference.eval()

logits = jax.jit(model.apply)(
    {"params": params}, batch.source, batch.target[:, :-1], batch.source != jf.PAD
)
inputs = torch.tensor(batch.source), torch.tensor(batch.target[:, :-1])
reference_logits = reference(*inputs, inputs[0] != jf.PAD).detach().numpy()

print("logits", logits.shape, "greatest difference", f"{abs(logits - reference_logits).max():.0e}")
np.testing.assert_allclose(logits, reference_logits, atol=1e-4)

# %% [markdown]
# ## Gradients
#
# In JAX the gradient is what a function returns. In PyTorch `backward` stores it on each
# parameter, and adds to what is stored there: who forgets `zero_grad` trains on the sum of two
# gradients.


# %%
def loss(params, batch):
    """The loss of a batch in nats, summed over its words."""
    return jf.seq2seq_loss(model, pad=jf.PAD)(params, batch, None)[0]


gradient = jax.jit(jax.grad(loss))(params, batch)

reference.zero_grad()
nats, _ = reference.loss(batch)
nats.backward()
once = gradients_of(reference, config)

for ours, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(once), strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)
print("the gradients are equal up to rounding")

# %%
reference.loss(batch)[0].backward()  # without zero_grad
twice = gradients_of(reference, config)
ratio = twice["embedding"]["table"] / once["embedding"]["table"]
print("after a second backward the gradient is", np.nanmedian(ratio), "times as large")

# %% [markdown]
# ## State as a value, state in an object
#
# A JAX update returns new parameters. The old ones still exist, so one can go back. A PyTorch
# update overwrites the weights; who may want to go back makes a copy before.

# %%
optimizer = optax.sgd(0.01)
updates, _ = optimizer.update(gradient, optimizer.init(params), params)
updated = optax.apply_updates(params, updates)
loss_of = jax.jit(loss)
print("JAX, loss of the old and new parameters:")
print(f"{loss_of(params, batch):.3f}, {loss_of(updated, batch):.3f}")

# %%
reference.zero_grad()
before, _ = reference.loss(batch)
before.backward()
torch.optim.SGD(reference.parameters(), lr=0.01).step()
print("PyTorch, loss before and after step():")
print(f"{before.item():.3f}, {reference.loss(batch)[0].item():.3f}; the old weights are gone")

# %% [markdown]
# ## Randomness
#
# JAX has no global random state. Dropout takes a key, and the same key drops the same numbers. In
# PyTorch the state is hidden: two equal calls differ, and a call somewhere else changes what yours
# draws. A mode of the object, `train()` or `eval()`, says whether dropout is on.


# %%
@jax.jit
def with_dropout(key):
    """The mean of the logits with the dropout of `key`."""
    dropout_rng = jf.DropoutRng.create(key, jnp.arange(8))
    variables = {"params": params}
    inputs = batch.source, batch.target[:, :-1]
    logits = model.apply(variables, *inputs, dropout_rng=dropout_rng)
    return jnp.mean(jnp.asarray(logits))


first, second = jax.random.split(jax.random.key(0))
print(
    "JAX     key 1, key 2, key 1:", *(f"{with_dropout(key):.5f}" for key in (first, second, first))
)
assert with_dropout(first) == with_dropout(first) != with_dropout(second)

# %%
reference.train()
print("PyTorch three equal calls:  ", *(f"{reference(*inputs).mean():.5f}" for _ in range(3)))
reference.eval()
print("PyTorch in eval mode:       ", *(f"{reference(*inputs).mean():.5f}" for _ in range(3)))

# %% [markdown]
# ## One program for each shape
#
# `jax.jit` runs the Python function once for each shape, records the operations and compiles them.
# Later calls run the compiled program; the Python code, with its `print`, is not visited again.
# PyTorch runs each operation at once, whatever its shape.


# %%
@jax.jit
def traced(params, source, target):
    """The logits; says when Python code runs."""
    print("  Python runs for source", source.shape)
    return model.apply({"params": params}, source, target)


for length in (6, 6, 8, 6):
    print("call with", length, "words")
    traced(params, batch.source[:, :length], batch.target[:, :5])

# %% [markdown]
# So in JAX one plans the shapes: sentences are put into buckets and filled up with padding. In
# PyTorch one does not have to. And in PyTorch a `print` or a debugger at any line of the model
# shows real numbers, where a traced JAX function shows only shapes (`jax.debug.print` and
# `jax.disable_jit` help).

# %% [markdown]
# ## Per-example gradients
#
# A batch gives one gradient. Sometimes the gradient of each example is wanted: to find wrong
# labels, or for differential privacy. In JAX `vmap` turns the function for one example into one
# for many.

# %%
rows = jax.tree.map(lambda leaf: leaf[:, None], batch)  # 8 batches of one row
each = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(params, rows)

for one, total in zip(jax.tree.leaves(each), jax.tree.leaves(gradient), strict=True):
    np.testing.assert_allclose(one.sum(axis=0), total, atol=1e-3, rtol=1e-3)
norms = jax.vmap(optax.tree.norm)(each)
print("norm of each sentence's gradient:", *(f"{norm:.1f}" for norm in norms))
print(f"norm of their sum: {optax.tree.norm(gradient):.1f}")

# %% [markdown]
# An object with hidden state cannot be mapped. PyTorch has the same transformations in
# `torch.func`, for the functional form of a model: `functional_call` takes the weights as an
# argument, as JAX does.

# %%
load_params(params, reference, config)  # the weights from before the update
weights = {name: weight.detach() for name, weight in reference.named_parameters()}
pad = torch.tensor(jf.PAD)


def reference_loss(weights, source, target):
    """The loss of one sentence in nats."""
    arguments = source[None], target[None, :-1], (source != pad)[None]
    logits = functional_call(reference, weights, arguments)[0]
    return torch.nn.functional.cross_entropy(
        logits, target[1:], ignore_index=jf.PAD, reduction="sum"
    )


sentences = torch.tensor(batch.source), torch.tensor(batch.target).long()
reference_each = vmap(grad(reference_loss), in_dims=(None, 0, 0))(weights, *sentences)
tables = reference_each["embedding.weight"].numpy(), each["embedding"]["table"]
np.testing.assert_allclose(*tables, atol=1e-3, rtol=1e-3)
print("torch.func gives the same gradients:", tables[0].shape)

# %% [markdown]
# ## Many seeds in one program
#
# A training is a function of its seed. So `vmap` trains several models at once, each from its own
# initialisation, and the picture shows how much the seed matters. With objects one writes a loop
# over models, or several processes.


# %%
def train(key, steps=150):
    """The parameters after a training that starts from `key`, and the loss at each step."""
    optimizer = optax.adam(3e-3)
    start = model.init(key, batch.source, batch.target)["params"]

    def update(carry, step):
        params, state = carry
        rows = jax.random.randint(jax.random.fold_in(key, step), (32,), 0, len(source))
        inputs = jnp.asarray(source)[rows], jnp.asarray(target)[rows], rows
        batch = jf.PairBatch(*inputs)
        nats, gradient = jax.value_and_grad(loss)(params, batch)
        words = jnp.sum(batch.target[:, 1:] != jf.PAD)
        changes, state = optimizer.update(gradient, state)
        return (optax.apply_updates(params, changes), state), nats / words

    (params, _), losses = jax.lax.scan(update, (start, optimizer.init(start)), jnp.arange(steps))
    return params, losses


trained, losses = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(1), 4))
print("losses", losses.shape, "embedding tables", trained["embedding"]["table"].shape)
assert (losses[:, -1] < 0.5 * losses[:, 0]).all()

# %%
curves = [(range(losses.shape[1]), one) for one in np.asarray(losses)]
plots.learning_curves({"loss": {"training": curves}})

# %% [markdown]
# The parameters of all four models are one tree whose leaves have one more axis. Their ensemble is
# a `vmap` over that axis and a mean.

# %%
apply = jax.vmap(lambda params: model.apply({"params": params}, batch.source, batch.target[:, :-1]))
ensemble = jax.nn.softmax(jax.jit(apply)(trained)).mean(axis=0)
np.testing.assert_allclose(ensemble.sum(axis=-1), 1.0, rtol=1e-5)
print("probabilities of the ensemble:", ensemble.shape)

# %% [markdown]
# ## Derivatives of derivatives
#
# A gradient is a function, so it has derivatives too. The product of the Hessian with a vector is
# the derivative of the gradient along that vector; the Hessian itself is never computed. It is
# symmetric, and this can be checked: u H v = v H u.


# %%
@jax.jit
def hessian_vector(params, direction):
    """The Hessian of the loss at `params`, times `direction`."""
    return jax.jvp(lambda params: jax.grad(loss)(params, batch), (params,), (direction,))[1]


left = optax.tree.vdot(gradient, hessian_vector(params, params))
right = optax.tree.vdot(params, hessian_vector(params, gradient))
print(f"u H v = {left:.4g}, v H u = {right:.4g}")
np.testing.assert_allclose(left, right, rtol=1e-2)

# %% [markdown]
# ## Where each is more pleasant
#
# | task | functional | object |
# |---|---|---|
# | read a model for the first time | parameters come from outside | **everything in one class** |
# | debug a line | traced values have shapes only | **print, debugger, real numbers** |
# | inputs of any shape | a program for each shape | **any shape at once** |
# | change one weight by hand | replace a leaf of the tree | **assign to an attribute** |
# | undo an update, compare two states | **keep the old value** | copy before |
# | repeat a run to the bit | **keys are arguments** | seed all hidden states, in order |
# | per-example gradients, Hessians | **transform the function** | `torch.func` |
# | many seeds, ensembles | **`vmap` over the training** | a loop or processes |
# | many devices | **the same function over a mesh** | a wrapper for each strategy |
#
# Bold is our preference. `python -m experiments.torch_reference.compare` compares whole trainings.
#
# ## Exercise
#
# Train four models at once with `vmap`, as above, but give each its own learning rate instead of
# its own seed. Which part of the function has to become an argument? Then write the same with the
# object of PyTorch, and count the lines that change.
