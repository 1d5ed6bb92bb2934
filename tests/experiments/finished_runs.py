"""Folders of finished runs, without a training."""

import json
import math

import numpy as np

from experiments.harness.runs.sample_tables import lines_digest, write_table
from experiments.translation.scoring import score_hypotheses

WORDS = "ein Haus steht am alten Fluss und die Sonne scheint heute sehr hell".split()


def sentences(count, seed):
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(count)]


def worse(lines, share, seed):
    """`lines` with about `share` of their words replaced."""
    rng = np.random.default_rng(seed)
    return [
        " ".join(rng.choice(WORDS) if rng.random() < share else word for word in line.split())
        for line in lines
    ]


def write_run(folder, hypotheses, references, *, seed=0, width=7, steps=(40,), **more):
    """The files of a finished translation run."""
    (folder / "samples").mkdir(parents=True)
    config = {"name": folder.name, "model": {"width": width}, "training": {"seed": seed}}
    config["data"] = {"target_language": "de"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "env.json").write_text("{}")
    columns = {"source": references[::-1], "model": hypotheses, "reference": references}
    write_table(folder / "samples" / "test.tsv", columns)
    scores = score_hypotheses(hypotheses, references) | {"text": "test"}
    scores |= {"text_sha256": lines_digest(references), **more}
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "weights.json").write_text(json.dumps({"steps": steps, "validation_bleu": 31.5}))
    return folder


def write_language_run(folder, losses, tokens, *, seed=0, bytes=None, digest="d1"):
    """The files of a finished run of a language model."""
    (folder / "samples").mkdir(parents=True)
    config = {"name": folder.name, "width": folder.name[0], "training": {"seed": seed}}
    (folder / "config.json").write_text(json.dumps(config))
    nats = np.array(losses) * tokens
    columns = {"nats": list(map(repr, nats.tolist())), "tokens": list(map(repr, tokens))}
    write_table(folder / "samples" / "test-losses.tsv", columns)
    total, count = nats.sum(), sum(tokens)
    size = bytes or 3 * count
    scores = {"text": "test", "text_sha256": digest, "tokens": count, "loss": total / count}
    scores |= {"bytes": size, "bits_per_byte": total / size / math.log(2)}
    scores |= {"words": 97, "perplexity": math.exp(total / count)}
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "weights.json").write_text(json.dumps({"steps": [7], "validation_loss": 1.5}))
    lines = ({"step": s, "validation_loss": 3 - s, "validation_own": s} for s in (1, 2))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
