"""Mistakes of newcomers, typed as commands: an exit code, no traceback, and the true cause."""

import gzip
import importlib
import shutil

import pytest

from experiments.harness import cli
from experiments.language_modelling import prepare
from tests.experiments.commands import call, parsed
from tests.experiments.tiny_runs import language_config

MISTAKES = {
    "language_modelling.train": [
        ("--preset stdlib", 2, "there is no preset 'stdlib': choose one of"),
        ("--batch_size 4", 2, "use --data.batch_size"),
        ("--data.train absent.txt", 65, "absent.txt: cannot read the file: No"),
        ("--data.train empty.txt", 65, "there is no text"),
        ("--data.train latin.txt", 65, "latin.txt:2: "),
        ("--data.train pairs.tsv", 2, "holds pairs of texts, but single texts"),
        ("--data.train short.txt", 65, "characters are too few to set"),
        ("--data.corpus files", 2, "'files' comes from files: give --data.tra"),
        ("--data.seq_len 999", 2, "the model's positions end at max_len="),
        ("--data.tokenizer bep", 2, "tokenizer='bep' is neither one of bpe, w"),
        ("--objective masked", 2, "objective='masked' needs encoder layers"),
        ("--strategy shard", 2, "must be auto|single|replicated|sharded"),
        ("--mesh data=2 --strategy single", 2, "needs --strategy sharded"),
        ("--strategy sharded --mesh data=9", 2, "needs 9 devices, but there"),
        ("--name ../a", 2, "'../a' cannot name a folder: use letters"),
        ("--runs a.txt", 74, "a.txt"),
        ("--resume absent", 2, "absent"),
        ("--init_from absent", 2, "absent is not a folder: give one with a"),
        ("--data.seq_len 19 --init_from {tiny}", 66, "no complete checkpoint: train first"),
        ("--continue_from {tiny}", 2, "is not the folder of a trained run"),
        ("--resume {translation}", 2, "is not a run of language_modelling"),
        ("--config optimiser.json", 2, "optimiser is unknown, did you mean optimizer?"),
        ("--data.train utf16.txt", 65, "as in UTF-16: convert the file"),
        ("--data.train body.jsonl", 65, "there is no field 'text', but body"),
        ("--data.train .", 65, ". is no regular file"),
        ("--data.train a.txt ./a.txt", 2, "a.txt is given twice"),
        ("--data.train table.csv", 65, "table.csv: a .csv file holds columns"),
        ("--data.train a.txt --data.validation table.csv", 65, "table.csv: a .csv file holds"),
        ("--data.train letter.docx", 65, "letter.docx: the file is a zip archive"),
        ("--data.train report.pdf", 65, "report.pdf: the file is a PDF document"),
        ("--data.train packed.txt", 65, "end its name in .gz"),
        ("--data.train --name a", 2, "--data.train takes values, but none was given"),
        ("--preset bert_tiny --init_from {causal}", 2, "the objective 'causal'"),
        ("--training.early_stopping_metric validation_chrf", 2, "give one of validation_loss"),
        ("--training.loss_chunk -1", 2, "loss_chunk=-1, but it must be at least 0"),
    ],
    "translation.train": [
        ("--data.train.target a.txt", 2, "parallel text needs both files"),
        ("--data.train.source a.txt --data.train.target short.txt", 65, "has 1: line i"),
        ("--beam_size 3", 2, "use --search.beam_size"),
        ("--init_from {causal}", 2, "another command"),
        ("--data.train.source a.txt", 2, "parallel text needs both files"),
        (
            "--data.train.source short.txt --data.train.target short.txt",
            65,
            "1 pairs are too few to set",
        ),
        ("--data.corpus files", 2, "give --data.train.source FILE"),
        ("--data.train.source table.csv", 65, "table.csv: a .csv file holds columns"),
        ("--data.train.source a.txt --data.train.target report.pdf", 65, "is a PDF document"),
    ],
    "language_modelling.finetune": [
        ("--init_from {begun}", 66, "has no complete checkpoint: train first"),
        ("--init_from {tiny}", 66, "no complete checkpoint: train first"),
        ("--init_from", 2, "--init_from takes one value, but 0 were given"),
        ("--preset pairs", 2, "_masked is not a folder: give one with a config.json"),
        ("--preset chat --init_from {causal}", 2, "give --data.train FILE"),
        ("--init_from=", 2, "a fine-tuning starts from a model: give --init_from"),
        ("--data.seq_len 19 --init_from {causal} --data.train swapped.tsv", 65, "label of its own"),
        (
            "--data.seq_len 19 --init_from {causal} --data.train labels.tsv",
            2,
            "give --task.num_examples from 2 to 36, or 0",
        ),
    ],
    "language_modelling.generate": [
        ("--run absent", 2, "absent is not a folder: give one with a conf"),
        ("--run {tiny}", 66, "no complete checkpoint: train first"),
        ("--run {translation}", 2, "by another command or version"),
        ("--run {causal} --text a --input b", 2, "--text or --input, not"),
        ("--run {causal} --input .", 65, "cannot read the file"),
        ("--run {causal} --input report.pdf", 65, "report.pdf: the input is a PDF document"),
        ("--run {causal} --text", 2, "--text takes values, but none was given"),
    ],
    "language_modelling.evaluate": [
        ("--run {causal} --part tset", 2, "test|validation|train"),
        ("--run {causal} --files absent.txt", 65, "absent.txt: cannot read"),
        ("--run {causal} --files b.txt b.txt", 2, "b.txt is given twice"),
        ("--run {causal} --files table.csv", 65, "table.csv: a .csv file holds columns"),
    ],
    "language_modelling.export": [
        ("--run {causal} --out .", 2, "give --out the name of a new folder"),
    ],
    "translation.translate": [
        ("--run .", 2, ". is not the folder of a run: it has no config.json"),
        ("--run {causal}", 2, "by another command or version"),
        ("--run {translation} --input absent.txt", 65, "absent.txt: cannot read"),
        ("--run {translation} --input bytes.txt", 65, "bytes.txt:1: byte 1 of the line (0xff)"),
        ("--run absent", 2, "absent is not a folder: give one with a config.json"),
        ("--run {translation} --input report.pdf", 65, "the input is a PDF document"),
        ("--run {translation} --input table.csv", 2, "table.csv holds columns with commas"),
        ("--run {translation} --input pairs.tsv", 2, "pairs.tsv holds columns with tabs"),
        ("--run {translation} --input body.jsonl", 2, "body.jsonl holds records"),
    ],
    "translation.evaluate": [
        ("--run {translation} --source a.txt", 2, "parallel text needs both files"),
        ("--run {translation} --step 4", 66, "no checkpoint of step 4: it keeps 3"),
        ("--run {translation} --beam_size -1", 2, "beam_size=-1"),
        ("--run {translation} --source blank.txt --target blank.txt", 65, "nothing to score"),
    ],
    "runs": [
        ("list .", 65, "there is no run in .: train first"),
        ("lits", 2, "'lits' is neither a folder nor one of list, compare"),
        ("diff {causal}", 2, "1 runs were given: give the folders of two"),
        ("page a b", 2, "a is not the folder of a run: it has no config.json"),
        ("plot", 2, "no runs were given"),
        ("compare {tiny}", 2, "has no scores.json: finish its training first"),
        ("compare", 2, "no runs were given"),
    ],
    "sweep": [
        ("chess", 2, "experiment='chess' is unknown: give translation, lan"),
        ("translation --vary learning_rate=1", 2, "use --optimizer.learning_rate"),
    ],
    "plan": [
        ("chess", 2, "experiment='chess' is unknown: give translation, lan"),
        ("language_modelling --target h300", 2, "target='h300' is unknown: give one of "),
        ("language_modelling --target v5ex4", 2, "several chips of a TPU as v5e:4x4"),
        ("language_modelling --target h100:2x2", 2, "several GPUs as h100x8"),
        ("language_modelling --target h100x0", 2, "'h100x0' has no devices: give at least one"),
        ("language_modelling --compiler tpu", 2, "but the target is h100"),
        ("language_modelling --compiler cuda --target v5p", 2, "but the target is v5p"),
        ("language_modelling --compiler gcc", 2, '--compiler is "gcc", but must be cpu|tpu|cuda'),
    ],
}


@pytest.fixture(scope="module")
def places(causal_run, translation_run, tmp_path_factory):
    """A folder with texts, and runs to name; tiny and begun were never trained."""
    here = tmp_path_factory.mktemp("mistakes")
    assert call(prepare, language_config(here, name="tiny")).code == 0
    texts = {"empty.txt": b"", "latin.txt": b"sun\nK\xe4se\n", "short.txt": b"sun moon\n"}
    numbered = [(b"ab"[i % 2 : i % 2 + 1], b"sun moon %d" % i) for i in range(40)]
    texts |= {"labels.tsv": b"".join(b"%s\t%s\n" % each for each in numbered)}
    texts |= {"swapped.tsv": b"".join(b"%s\t%s\n" % each[::-1] for each in numbered)}
    texts |= {"blank.txt": b"\n \n", "table.csv": b"number,text\n" + b"1,sun moon\n" * 40}
    texts |= {"letter.docx": b"PK\x03\x04sun", "report.pdf": b"%PDF-1.4\n" + b"sun moon\n" * 40}
    texts |= {"packed.txt": gzip.compress(b"sun moon\n" * 40)}
    texts |= {"bytes.txt": b"\xff\nsun\n", "utf16.txt": ("sun moon\n" * 9).encode("utf-16")}
    texts |= {"body.jsonl": b'{"body": "sun"}\n', "optimiser.json": b'{"optimiser": {}}'}
    for name, text in (texts | {"pairs.tsv": b"sun\tmoon\n" * 9}).items():
        (here / name).write_bytes(text)
    tiny, begun = here / "runs" / "language_modelling" / "tiny", here / "begun"
    begun.mkdir()
    shutil.copy(tiny / "config.json", begun)
    runs = {"causal": causal_run.folder, "translation": translation_run.folder}
    return here, runs | {"tiny": tiny, "begun": begun}


ROWS = [(name, *row) for name, rows in MISTAKES.items() for row in rows]


@pytest.mark.parametrize(("name", "typed", "code", "said"), ROWS, ids=lambda x: str(x)[:60])
def test_a_mistake_is_answered_with_its_cause(name, typed, code, said, places, monkeypatch, capsys):
    here, runs = places
    monkeypatch.chdir(here)
    words = typed.format(**runs).split()
    command = importlib.import_module(f"experiments.{name}")
    takes_words = name in ("runs", "sweep", "plan")
    found = cli.run(lambda: command.main(words if takes_words else parsed(command, words)))
    printed = capsys.readouterr().err
    assert (found, "Traceback" in printed) == (code, False), printed
    *_, last = printed.splitlines()
    assert last.startswith("error: ") and said in last
