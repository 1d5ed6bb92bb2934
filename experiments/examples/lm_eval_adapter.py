"""lm-evaluation-harness (lm-eval) with a model of ours.

    python -m experiments.examples.lm_eval_adapter --model FOLDER --tasks arc_easy,piqa

From Python, `lm_eval.simple_evaluate(model=JaxformerLM(jf.load(folder)), tasks=[...])`. Texts get
the ids that the harness's own "hf" models give them, so that the scores are comparable.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import jaxformer as jf
from experiments.harness import cli
from jaxformer.errors import ConfigError

Pair = tuple[Any, list[int], list[int]]
"""The text that was asked, the ids of a context and of a continuation."""


class JaxformerLM(TemplateLM):
    """A language model for `lm_eval.simple_evaluate`: `loaded` is what `jf.load` returns.

    Answers of a question share its context, which is read once. `max_gen_toks` limits texts whose
    task does not.
    """

    def __init__(self, loaded: jf.Loaded, max_gen_toks: int = 256) -> None:
        super().__init__()
        self.loaded = loaded
        self.ids = loaded.require_tokenizer()
        self.max_length: int = loaded.model.config.max_len
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        eos = self.ids.special.eos
        if eos is None:
            raise ConfigError("the tokenizer has no token that ends a text: give one with EOS")
        return eos

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without a context."""
        bos = self.ids.special.bos
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's cache of requests."""
        return self.ids.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """The ids of a text; BOS is before it only where it is asked for."""
        ids = self.ids.encode(string)
        return [self.prefix_token_id, *ids] if add_special_tokens else ids

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each text, in windows of `max_length` tokens."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                pairs.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (log_prob, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            sums[number] += log_prob
        for request, log_prob in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, log_prob)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to the strings that its task names."""
        texts = [""] * len(requests)
        for settings, numbers in _by_settings(requests).items():
            options: dict[str, Any] = {
                **normalize_gen_kwargs(json.loads(settings), self.max_gen_toks)
            }
            most = options["max_gen_toks"]
            temperature = options.get("temperature", 1.0) if options["do_sample"] else 0.0
            prompts = [self.tok_encode(requests[number].args[0]) for number in numbers]
            written = jf.complete(
                self.loaded,
                [ids[most - self.max_length :] or [self.prefix_token_id] for ids in prompts],
                jf.SamplingConfig(
                    temperature=temperature,
                    top_k=options.get("top_k", 0),
                    top_p=options.get("top_p", 1.0),
                    max_new_tokens=most,
                ),
                jf.CompletionOptions(stop=tuple(filter(None, options["until"]))),
            )
            for number, text in zip(numbers, written, strict=True):
                texts[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether greedy search would write it."""
        continuations: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            kept = (context + continuation)[-self.max_length - 1 : -len(continuation)]
            continuations.setdefault(tuple(kept), []).append((number, continuation))
        questions = [
            (context, [continuation for _, continuation in numbered])
            for context, numbered in continuations.items()
        ]
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        scored = jf.score_continuations(self.loaded, questions) if questions else []
        for numbered, scores in zip(continuations.values(), scored, strict=True):
            for (number, _), each in zip(numbered, scores, strict=True):
                results[number] = sum(each.log_probs), all(each.most_likely)
                asked = requests[number][0]
                if asked is not None:
                    self.cache_hook.add_partial("loglikelihood", asked, results[number])
        return results


def _by_settings(requests: Iterable[Instance]) -> dict[str, list[int]]:
    """The settings of texts as JSON -> the numbers of the requests that have them."""
    groups: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        arguments: tuple[Any, ...] = request.args
        settings = json.dumps(arguments[1], sort_keys=True)
        groups.setdefault(settings, []).append(number)
    return groups


@dataclass(frozen=True)
class LmEvalOptions:
    """The model, the tasks, and how much of them."""

    model: str = "runs/language_modelling/python_stdlib"
    """The folder of a run, or of a causal model as transformers writes it."""
    tasks: str = "arc_easy"
    """Names of tasks of the harness, separated by commas; it downloads their data."""
    limit: int = 0
    """The number of examples of each task; 0: all."""


def main(options: LmEvalOptions) -> None:
    """Prints the results of each task."""
    evaluate: Any = lm_eval.simple_evaluate  # its decorator hides its arguments
    found = evaluate(
        model=JaxformerLM(jf.load(options.model)),
        tasks=options.tasks.split(","),
        limit=options.limit or None,
    )
    for line in _lines(found["results"]):
        print(line)


def _lines(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each metric of each task."""
    for task, metrics in results.items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                yield f"{task}: {name.partition(',')[0]} {value:.4f}"


if __name__ == "__main__":
    cli.start(main, {"default": LmEvalOptions()}, __doc__)
