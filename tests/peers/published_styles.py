"""Small tokenizers, each in the files that published models of a family have."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
QWEN2 = LLAMA3.replace("{1,3}", "")
REST = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NLLB = ("ace_Arab", "deu_Latn", "eng_Latn", "fra_Latn")
MBART = ("ar_AR", "de_DE", "en_XX", "ro_RO")
FAIRSEQ = {"bos": "<s>", "eos": "</s>", "cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}

Lines = Sequence[str]
Train = Callable[..., bytes]
"""SentencePiece's training, a model file of lines."""


def write(folder: Path, **files: Any) -> None:
    """Writes JSON files by their names, in which a "__" stands for the dot before json."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def mask(name: str = "<mask>", **spaces: bool) -> AddedToken:
    return AddedToken(name, special=True, normalized=False, **({"lstrip": True} | spaces))


def around(tokenizer: Tokenizer, *parts: str) -> processors.TemplateProcessing:
    names = [part for part in parts if part != "$A"]
    return processors.TemplateProcessing(
        single=list(parts), special_tokens=[(x, tokenizer.token_to_id(x)) for x in set(names)]
    )


def decoder_of(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The added tokens as tokenizer_config.json has them."""
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {str(index): {key: getattr(token, key) for key in keys} for index, token in added}


def byte_level(lines: Lines, special: list[Any], pattern: str = "") -> Tokenizer:
    """BPE of bytes; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern + REST), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def pieces(lines: Lines, special: list[Any], prepend: str = "first") -> Tokenizer:
    """BPE of SentencePiece's pieces, with bytes for unknown characters (Llama, Mistral)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    content = json.loads(tokenizer.to_str())
    kept = {token.content if isinstance(token, AddedToken) else token for token in special}
    content["added_tokens"] = [x for x in content["added_tokens"] if x["content"] in kept]
    return Tokenizer.from_str(json.dumps(content))


def unigram(lines: Lines, special: list[Any], last: Sequence[Any] = ()) -> Tokenizer:
    """Unigram pieces as XLM-R, mBART and T5 have them; `last` follow the pieces."""
    tokenizer = Tokenizer(models.Unigram())
    cut = pre_tokenizers
    tokenizer.pre_tokenizer = cut.Sequence([cut.WhitespaceSplit(), cut.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(last))
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer, kind: str, names: dict, **config: Any) -> None:
    """Writes the tokenizer and its configuration; `names` are its special tokens by their roles."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"added_tokens_decoder": decoder_of(tokenizer), "tokenizer_class": kind}
    write(folder, tokenizer_config=config | roles(names))


def roles(names: dict[str, Any]) -> dict[str, Any]:
    return {f"{role}_token": name for role, name in names.items()}


def gpt2(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, ["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config={"model_max_length": 64})


def smollm(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    names = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>"}
    save(folder, tokenizer, "GPT2Tokenizer", names | {"unk": "<|endoftext|>"})


def llama2(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = pieces(lines, ["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = around(tokenizer, "<s>", "$A")
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": None}
    save(folder, tokenizer, "LlamaTokenizer", names, add_bos_token=True, legacy=False)


def llama3(folder: Path, lines: Lines, _: Train) -> None:
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    tokenizer = byte_level(lines, names, LLAMA3)
    begins = around(tokenizer, "<|begin_of_text|>", "$A")
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begins])
    names = {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"}
    save(folder, tokenizer, "PreTrainedTokenizerFast", names)


def deepseek(folder: Path, lines: Lines, _: Train) -> None:
    names = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    tokenizer = byte_level(lines, names, LLAMA3)
    tokenizer.post_processor = around(tokenizer, names[0], "$A")
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False}
    bos, eos = (token | {"single_word": False, "content": name} for name in names)
    save(folder, tokenizer, "PreTrainedTokenizerFast", {"bos": bos, "eos": eos})


def qwen2(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, [], QWEN2)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>"])
    names = {"bos": None, "eos": "<|im_end|>", "pad": "<|endoftext|>", "unk": None}
    save(folder, tokenizer, "Qwen2Tokenizer", names, add_bos_token=False)


def old_qwen2(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, [], QWEN2)
    tokenizer.model.save(str(folder))
    size = tokenizer.get_vocab_size()
    added = {"<|endoftext|>": size, "<|im_start|>": size + 1, "<|im_end|>": size + 2}
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    names |= {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
    write(folder, added_tokens=added, special_tokens_map=names)
    write(folder, tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "bos_token": None})


def gemma(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = pieces(lines, ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = around(tokenizer, "<bos>", "$A")
    names = {role: f"<{role}>" for role in ("bos", "eos", "pad", "unk")}
    save(folder, tokenizer, "GemmaTokenizer", names, add_bos_token=True)


def opt(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, ["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.model.save(str(folder))
    token = {"content": "</s>", "lstrip": False, "normalized": True, "rstrip": False}
    names = dict.fromkeys(("bos", "eos", "unk"), token | {"single_word": False})
    write(folder, special_tokens_map=roles(names | {"pad": "<pad>"}))
    config = {"add_bos_token": True, "pad_token": "<pad>", "tokenizer_class": "GPT2Tokenizer"}
    write(folder, tokenizer_config=config)


def gpt_neox(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, ["<|endoftext|>", "<|padding|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = roles(dict.fromkeys(("bos", "eos", "unk"), "<|endoftext|>"))
    kind = {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False}
    write(folder, tokenizer_config=kind | names, special_tokens_map=names)


def bert(folder: Path, lines: Lines, _: Train) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    words = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word, _ in words), encoding="utf-8")
    write(folder, tokenizer_config={"do_lower_case": True})


def roberta(folder: Path, lines: Lines, _: Train) -> None:
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = byte_level(lines, [*names, mask()])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config={"model_max_length": 64})


def old_roberta(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = byte_level(lines, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    tokenizer.model.save(str(folder))


def xlm_roberta(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = unigram(lines, ["<s>", "<pad>", "</s>", "<unk>"], [mask()])
    tokenizer.post_processor = around(tokenizer, "<s>", "$A", "</s>")
    save(folder, tokenizer, "XLMRobertaTokenizer", FAIRSEQ | {"mask": "<mask>"})


def mbart(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = unigram(lines, ["<s>", "<pad>", "</s>", "<unk>"], [*MBART, mask()])
    tokenizer.post_processor = around(tokenizer, "$A", "</s>", "en_XX")
    save(folder, tokenizer, "MBartTokenizer", FAIRSEQ | {"mask": "<mask>"})


def nllb(folder: Path, lines: Lines, _: Train) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always", split=True)
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([*NLLB, mask()])
    tokenizer.post_processor = around(tokenizer, "$A", "</s>", "eng_Latn")
    more = {"additional_special_tokens": [*NLLB], "src_lang": None, "tgt_lang": None}
    save(folder, tokenizer, "NllbTokenizer", FAIRSEQ | {"mask": "<mask>"}, **more)


def m2m100(folder: Path, lines: Lines, train: Train) -> None:
    (folder / "sentencepiece.bpe.model").write_bytes(train(lines, vocab_size=210))
    import sentencepiece
    from transformers.models.m2m_100 import tokenization_m2m_100 as theirs

    languages = [f"__{code}__" for code in theirs.FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    model = sentencepiece.SentencePieceProcessor(str(folder / "sentencepiece.bpe.model"))
    known = [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    names = ["<s>", "<pad>", "</s>", "<unk>", *known]
    write(folder, vocab={name: i for i, name in enumerate(names)})
    tokens = roles({role: name for role, name in FAIRSEQ.items() if role != "cls"})
    write(folder, special_tokens_map=tokens | {"additional_special_tokens": languages})
    write(folder, tokenizer_config=tokens | {"tokenizer_class": "M2M100Tokenizer"})


def marian(folder: Path, lines: Lines, train: Train) -> None:
    import sentencepiece

    names = ["</s>", "<unk>"]
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(train(lines, vocab_size=200))
        model = sentencepiece.SentencePieceProcessor(str(folder / f"{side}.spm"))
        names += [model.id_to_piece(i) for i in range(3, model.get_piece_size())]
    names = [*dict.fromkeys(names), "<pad>"]
    write(folder, vocab={name: i for i, name in enumerate(names)})
    write(folder, tokenizer_config={"source_lang": "en", "target_lang": "de"})


def t5(folder: Path, lines: Lines, train: Train) -> None:
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    (folder / "spiece.model").write_bytes(train(lines, vocab_size=211, **ids))
    write(folder, tokenizer_config={"model_max_length": 64, "extra_ids": 7})


def mt5(folder: Path, lines: Lines, _: Train) -> None:
    marks = [f"<extra_id_{number}>" for number in range(3)]
    tokenizer = unigram(lines, ["<pad>", "</s>", "<unk>"], marks)
    tokenizer.post_processor = around(tokenizer, "$A", "</s>")
    names = {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
    save(folder, tokenizer, "T5Tokenizer", names, extra_ids=0, additional_special_tokens=marks)


STYLES: dict[str, tuple[str, Callable[[Path, Lines, Train], None]]] = {
    "gpt2": ("GPT2LMHeadModel", gpt2),
    "smollm": ("LlamaForCausalLM", smollm),
    "llama2": ("LlamaForCausalLM", llama2),
    "llama3": ("LlamaForCausalLM", llama3),
    "deepseek": ("LlamaForCausalLM", deepseek),
    "mistral": ("MistralForCausalLM", llama2),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen2, older": ("Qwen2ForCausalLM", old_qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen2),
    "gemma": ("GemmaForCausalLM", gemma),
    "gemma2": ("Gemma2ForCausalLM", gemma),
    "gemma3": ("Gemma3ForCausalLM", gemma),
    "opt": ("OPTForCausalLM", opt),
    "gpt_neox": ("GPTNeoXForCausalLM", gpt_neox),
    "bert": ("BertForMaskedLM", bert),
    "distilbert": ("DistilBertForMaskedLM", bert),
    "roberta": ("RobertaForMaskedLM", roberta),
    "roberta, older": ("RobertaForMaskedLM", old_roberta),
    "xlm-roberta": ("XLMRobertaForMaskedLM", xlm_roberta),
    "bart": ("BartForConditionalGeneration", roberta),
    "mbart": ("MBartForConditionalGeneration", mbart),
    "nllb": ("M2M100ForConditionalGeneration", nllb),
    "m2m_100": ("M2M100ForConditionalGeneration", m2m100),
    "marian": ("MarianMTModel", marian),
    "t5": ("T5ForConditionalGeneration", t5),
    "mt5": ("MT5ForConditionalGeneration", mt5),
}
"""The class of the model and the writer of the tokenizer's files."""
