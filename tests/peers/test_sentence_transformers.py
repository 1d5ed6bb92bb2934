"""Vectors of texts are those of sentence-transformers. Run with `-m peer`."""

import json
import shutil

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.errors import ConfigError

library = pytest.importorskip("sentence_transformers", reason="needs the extra peers")
pytestmark = pytest.mark.peer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "σ", ":", "##a", "##b"]
TEXTS = ["a b c", "", "Abba ΟΔΟΣ", "d", "j i h g f e d c b a a b c d e", " b a ", "İ É a"]
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@pytest.fixture(scope="module")
def bert(torch, transformers, tmp_path_factory):
    """The folder of a small BERT that tells capitals from small letters."""
    folder = tmp_path_factory.mktemp("bert")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=False)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 17, "max_position_embeddings": 13, "vocab_size": len(WORDS)}
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.3 * torch.randn(weights.shape)
    model.save_pretrained(folder)
    return folder


def modules(torch, folder, case):
    """The modules of sentence-transformers of a `case`."""
    parts = library.sentence_transformer.modules
    text = parts.Transformer(
        str(folder), max_seq_length=case.get("most"), do_lower_case=case["lower"]
    )
    pooling = parts.Pooling(12, case["pooling"], include_prompt=case.get("pools_prompt", True))
    size, after = pooling.get_embedding_dimension(), []
    for activation, residual in case.get("dense", ()):
        out = size if residual == "square" else 7
        function = getattr(torch.nn, activation)()
        after.append(parts.Dense(size, out, True, function, use_residual=bool(residual)))
        size = out
    if case.get("norm"):
        norm = parts.LayerNorm(size)
        torch.nn.init.normal_(norm.norm.bias)  # a new one is zero
        after += [norm, parts.Dropout(0.1)]
    if case.get("normalize"):
        after.append(parts.Normalize())
    return [text, pooling, *after]


CASES = [
    *({"pooling": mode, "lower": False} for mode in MODES),
    {"pooling": ("cls", "weightedmean"), "lower": True, "most": 7, "normalize": True},
    {
        "pooling": "mean",
        "lower": True,
        "dense": [("Tanh", ""), ("GELU", "square"), ("ReLU", "other")],
        "norm": True,
        "prompts": {"query": "a b: ", "passage": ""},
        "prompt": "query",
    },
    {
        "pooling": "mean",
        "lower": False,
        "normalize": True,
        "pools_prompt": False,
        "prompts": {"query": "a b: ", "passage": "c: "},
    },
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["pooling"]) + str(len(case)))
@pytest.mark.filterwarnings("ignore:.*of 7 texts have more than")
def test_a_folder_with_modules_gives_the_vectors_of_sentence_transformers(
    case, torch, bert, tmp_path, assert_equal
):
    theirs = library.SentenceTransformer(
        modules=modules(torch, bert, case),
        prompts=case.get("prompts"),
        default_prompt_name=case.get("prompt"),
        device="cpu",
    )
    theirs.save(str(tmp_path))
    ours = jf.load(tmp_path)
    assert_equal(jf.embed(ours, TEXTS), theirs.encode(TEXTS))
    for name in case.get("prompts", ()):
        assert_equal(jf.embed(ours, TEXTS, prompt=name), theirs.encode(TEXTS, prompt_name=name))
    if "prompts" in case:
        with pytest.raises(ConfigError, match="prompt='title'"):
            jf.embed(ours, TEXTS, prompt="title")


@pytest.mark.filterwarnings("ignore:.*of 7 texts have more than")
def test_a_folder_of_an_older_version_is_read_in_lower_case_without_a_normalizer(
    torch, bert, tmp_path, assert_equal
):
    case = {"pooling": "mean", "lower": True}
    library.SentenceTransformer(modules=modules(torch, bert, case)).save(str(tmp_path))
    shutil.copy(bert / "tokenizer.json", tmp_path)  # newer ones put the lower case there
    older = {"max_seq_length": 7, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(older))
    theirs = library.SentenceTransformer(str(tmp_path), device="cpu")
    assert_equal(jf.embed(jf.load(tmp_path), TEXTS), theirs.encode(TEXTS))


def test_a_text_that_is_cut_is_named_and_modules_that_are_not_computed_are_refused(
    torch, bert, tmp_path
):
    case = {"pooling": "mean", "lower": False, "most": 9, "normalize": True}
    library.SentenceTransformer(modules=modules(torch, bert, case)).save(str(tmp_path))
    with pytest.warns(UserWarning, match="1 of 7 texts .* 9 tokens"):
        vectors = jf.embed(jf.load(tmp_path), TEXTS)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(7), abs=1e-6)
    path = tmp_path / "modules.json"
    listed = json.loads(path.read_text())
    for kind, said in (
        ("sentence_transformers.models.CNN", "the module CNN is not supported"),
        ("mine.Normalize", "the module mine.Normalize is not supported"),
    ):
        path.write_text(json.dumps([*listed[:2], listed[2] | {"type": kind}]))
        with pytest.raises(ConfigError, match=said):
            jf.embed(jf.load(tmp_path), "a")
