"""Metrics by name: label, unit, scale, and whether less or more is better."""

from typing import NamedTuple


class Quantity(NamedTuple):
    """The words for a number of metrics.jsonl or scores.json: value times `scale` is in `unit`."""

    label: str
    unit: str = ""
    scale: float = 1.0
    better: str = ""
    """"lower" or "higher"; "" for what is no score."""
    log: bool = False
    """Whether a logarithmic axis helps."""


_QUANTITIES = {
    "loss": Quantity("loss", "nats per token", better="lower", log=True),
    "bleu": Quantity("BLEU", better="higher"),
    "chrf": Quantity("chrF", better="higher"),
    "exact": Quantity("exact", "%", 100.0, better="higher"),
    "accuracy": Quantity("accuracy", "%", 100.0, better="higher"),
    "f1": Quantity("F1", better="higher"),
    "rougeLsum": Quantity("ROUGE-Lsum", better="higher"),
    "bits_per_byte": Quantity("bits per byte", better="lower"),
    "perplexity": Quantity("perplexity", "per token", better="lower", log=True),
    "word_perplexity": Quantity("word perplexity", "per word", better="lower", log=True),
    "learning_rate": Quantity("learning rate"),
    "grad_norm": Quantity("gradient norm", log=True),
    "padding": Quantity("padding", "% of positions", 100.0),
    "tokens_per_second": Quantity("speed", "tokens/s"),
    "data_wait": Quantity("wait for a batch", "ms", 1e3),
    "mfu": Quantity("MFU", "% of peak FLOP/s", 100.0),
    "memory": Quantity("memory in use", "GB", 1e-9),
    "memory_peak": Quantity("most memory in use", "GB", 1e-9),
}


def quantity(metric: str) -> Quantity:
    """The words for `metric`, the name of a number in metrics.jsonl or scores.json."""
    prefix, _, last = metric.removeprefix("validation_").rpartition(".")
    better = (x.better for end, x in _QUANTITIES.items() if x.better and last.endswith(end))
    known = _QUANTITIES.get(last, Quantity(last.replace("_", " "), better=next(better, "")))
    words = [prefix.replace("_", " "), known.label]
    if metric.startswith("validation_"):
        words.insert(0, "validation")
    return known._replace(label=" ".join(filter(None, words)))


def described(metric: str) -> str:
    """The label of a metric with its unit, and what is better."""
    kind = quantity(metric)
    better = f"{kind.better} is better" if kind.better else ""
    return ", ".join(filter(None, (f"{kind.label} {kind.unit}".strip(), better)))


def described_score(metric: str, value: float) -> str:
    """A score with its name, such as "loss 1.2345", "BLEU 31.42" or "exact 98.2%"."""
    kind = quantity(metric.removeprefix("validation_"))
    if kind.unit == "%":
        return f"{kind.label} {value:.1%}"
    return f"{kind.label} {value:.{2 if kind.better == 'higher' else 4}f}"
