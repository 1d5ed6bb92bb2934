"""`auto_attention` that notes which kernel computes each call."""

from jaxformer.ops.attention import AttentionSpec, auto_attention, choose


class Recorded:
    """`auto_attention`; `calls` are (name of the kernel, spec)."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, q, k, v, mask, *, scale, bias=None, dropout=None, **options):
        spec = AttentionSpec.create(q, k, v, mask, bias, dropout, **options)
        self.calls.append((choose(spec).name, spec))
        return auto_attention(q, k, v, mask, scale=scale, bias=bias, dropout=dropout, **options)
