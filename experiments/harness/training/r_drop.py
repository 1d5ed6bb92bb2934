"""R-Drop (Liang et al. 2021): two passes with two dropout masks are to give one distribution."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxformer.errors import ConfigError
from jaxformer.training.losses import Loss, TokenLoss


def r_drop(loss: Loss, weight: float) -> TokenLoss:
    """`loss` with two passes: half of equation 4, `weight` / 2 times the divergence between them.

    The sum of the divergence is the auxiliary sum "kl". Without dropout there is one pass. Raises
    `ConfigError` for a loss that is no `TokenLoss`.
    """
    if not isinstance(loss, TokenLoss):
        name = getattr(loss, "__qualname__", type(loss).__name__)
        raise ConfigError(
            f"r_drop={weight} was given, but the loss {name} is no TokenLoss, so its logits are "
            "not known: leave out --training.r_drop, or use another loss"
        )

    def terms(logits, labels, loss_mask, *leaves):
        leaves = labels, loss_mask, *leaves
        if logits.ndim == labels.ndim + 1:
            return loss.terms(logits, *leaves)
        first, second = logits[..., 0, :], logits[..., 1, :]
        both = (loss.terms(one, *leaves) for one in (first, second))
        nats, tokens, *sums = jax.tree.map(lambda a, b: (a + b) / 2.0, *both)
        kl = symmetric_kl(first, second, loss_mask)
        return nats + weight / 2.0 * kl, tokens, dict(*sums, kl=kl)

    return replace(loss, terms=terms, passes=2)


def symmetric_kl(
    logits: Float[Array, "*shape V"],
    others: Float[Array, "*shape V"],
    loss_mask: Bool[Array, "*shape"],
) -> Float[Array, ""]:
    """The sum of (KL(p || q) + KL(q || p)) / 2 in nats where `loss_mask` is True; float32.

    p and q are the distributions of `logits` and of `others`.
    """
    p, q = (jax.nn.log_softmax(x.astype(jnp.float32)) for x in (logits, others))
    nats = 0.5 * jnp.sum((jnp.exp(p) - jnp.exp(q)) * (p - q), axis=-1)
    return jnp.sum(jnp.where(loss_mask, nats, 0.0))
