"""Steps that are damaged or were never committed: the newest intact one is used, and it is said."""

import json
import warnings
import zlib

import pytest

from jaxformer import storage
from jaxformer.checkpoint import Checkpoints, manifest
from jaxformer.errors import CheckpointError
from tests.checkpoint.places import arrays, everywhere, flip, in_a_bucket, names
from tests.faults import states

DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(
        path.read_bytes()[: storage.length_and_sum(path)[0] // 2]
    ),
    "flipped": flip,
    "deleted": lambda path: path.unlink(),
}
# Each file damaged in each way: see tests/faults.
CASES = [
    ("here", "arrays", "flipped"),
    ("here", manifest.NAME, "empty"),
    ("here", "state/manifest.ocdbt", "deleted"),
    pytest.param("gs", "state/manifest.ocdbt", "half", marks=pytest.mark.long),
]


def opened(folder):
    """Checkpoints that have locked the folder, as at the start of a `with` block."""
    return Checkpoints(folder).__enter__()


@pytest.mark.parametrize(("place", "name", "kind"), CASES, indirect=["place"])
def test_a_damaged_newest_step_gives_way_to_the_one_before(three, name, kind):
    path = arrays(three / "5") if name == "arrays" else three / "5" / name
    DAMAGE[kind](path)
    there = storage.lengths(three / "5")
    with pytest.warns(UserWarning, match=f"{path} .*step 3 "):
        assert states.is_right(Checkpoints(three), 3) and Checkpoints(three).newest_step() == 3
    with pytest.warns(UserWarning):
        assert Checkpoints(three).metadata() == {"step": 3}
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoints(three).average_params([5])
    assert names(three) == {"2", "3", "5"}
    with pytest.warns(UserWarning, match="step 3 ") as said:
        checkpoints = opened(three)
        assert states.is_right(checkpoints) and checkpoints.steps() == [2, 3]
    assert len(said) == 1 and storage.lengths(three / "5") == there, "it is said once, and stays"
    states.save(checkpoints, 5)
    checkpoints.close()
    assert names(three) == {"2", "3", "5"} and states.is_right(Checkpoints(three), 5)


def test_an_older_step_whose_files_have_another_length_is_named_once_and_left_out(three):
    path = arrays(three / "3")
    DAMAGE["half"](path)
    checkpoints = Checkpoints(three)
    with pytest.warns(UserWarning, match=f"{path} .*step 3 ") as said:
        assert checkpoints.newest_step() == 5
        assert checkpoints.steps() == checkpoints.steps() == [2, 5]
    assert len(said) == 1


def test_a_damaged_step_goes_when_a_newer_one_is_saved(three):
    flip(arrays(three / "5"))
    with pytest.warns(UserWarning), Checkpoints(three) as checkpoints:
        states.save(checkpoints, 7)
    assert names(three) == {"2", "3", "7"} and Checkpoints(three).best_step() == 7


def test_two_damaged_steps_give_way_to_the_third(three):
    flip(arrays(three / "5"))
    flip(three / "3" / "MANIFEST.json")
    with pytest.warns(UserWarning) as said, Checkpoints(three) as checkpoints:
        assert states.is_right(checkpoints) and checkpoints.newest_step() == 2
    assert len(said) == 2
    assert names(three) == {"2", "3", "5"}


def test_a_damaged_step_asked_for_by_number_is_refused_with_the_file(three):
    file = arrays(three / "5")
    flip(file)
    checkpoints = Checkpoints(three)
    reads = (lambda: checkpoints.restore({}, 5), lambda: checkpoints.average_params([3, 5]))
    for read in reads:
        with pytest.raises(CheckpointError, match=f"{file} .*CRC-32"):
            read()
    file.write_bytes(b"123")
    with pytest.raises(CheckpointError, match=f"{file} .*3 bytes"):
        checkpoints.restore({}, 5)
    file.unlink()
    with pytest.raises(CheckpointError, match=str(file)):
        checkpoints.restore({}, 5)


def test_a_folder_whose_steps_are_all_damaged_is_refused_with_each_reason_and_untouched(three):
    files = [arrays(three / str(step)) for step in (2, 3, 5)]
    for file in files:
        flip(file)
    checkpoints = Checkpoints(three)
    for use in (
        checkpoints.newest_step,
        lambda: checkpoints.save(7, {}, {}),
        lambda: opened(three),
    ):
        with pytest.raises(CheckpointError) as refused:
            use()
        said = str(refused.value)
        assert f"no checkpoint in {three} is intact" in said
        assert all(f"{file} is damaged" in said for file in files)
    assert names(three) == {"2", "3", "5"}


@everywhere
def test_a_step_that_was_never_committed_does_not_count_and_is_replaced(three):
    (three / "5" / manifest.NAME).unlink()
    with pytest.warns(UserWarning, match=f"{three}/5"):
        checkpoints = opened(three)
    assert checkpoints.steps() == [2, 3] and checkpoints.newest_step() == 3
    states.save(checkpoints, 5)
    checkpoints.close()
    assert names(three) == {"2", "3", "5"} and states.is_right(Checkpoints(three), 5)


def test_a_removal_that_was_interrupted_is_completed_by_the_next_start(three, monkeypatch):
    def half(folder):
        for name in list(storage.lengths(folder))[1::2]:
            (folder / name).unlink()

    with monkeypatch.context() as patch, Checkpoints(three, keep=3) as checkpoints:
        patch.setattr(storage, "remove_tree", half)
        states.save(checkpoints, 7)
        checkpoints.wait()
    assert Checkpoints(three).steps() == [3, 5, 7] and names(three) == {"2", "3", "5", "7"}
    opened(three).close()
    assert names(three) == {"3", "5", "7"}


@in_a_bucket
def test_what_a_kill_left_of_a_save_or_a_removal_does_not_count_and_is_removed(three):
    for name in (manifest.NAME, "commit_success.txt"):  # in the middle of saving step 5
        (three / "5" / name).unlink()
    (three / "2" / manifest.NAME).unlink()  # in the middle of removing step 2
    assert Checkpoints(three).steps() == [3] and names(three) == {"2", "3", "5"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(three).close()
    assert names(three) == {"3"}


@everywhere
@pytest.mark.parametrize("left", ["5", "5.orbax-checkpoint-tmp"])
def test_a_first_step_that_was_never_committed_is_said_and_training_may_start(place, left):
    (place / left).mkdir(parents=True)
    (place / left / "state").write_bytes(b"half")
    with pytest.warns(UserWarning, match="never committed"):
        checkpoints = opened(place)
    assert checkpoints.steps() == [] and checkpoints.newest_step() is None
    states.save(checkpoints, 5)
    checkpoints.close()
    assert states.is_right(Checkpoints(place)) and names(place) == {"5"}


def test_a_folder_that_was_trained_in_but_has_no_committed_step_is_refused(tmp_path):
    for name in ("2", "5"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="is committed"):
        opened(tmp_path)
    assert names(tmp_path) == {"2", "5"}


def test_a_manifest_that_is_too_deep_is_refused(three):
    rest = b'"format": ' + b"[" * 100_000
    path = three / "5" / "MANIFEST.json"
    path.write_bytes(b'{"crc32": "%08x", ' % zlib.crc32(rest) + rest)
    with pytest.raises(CheckpointError, match="MANIFEST.json"):
        Checkpoints(three).metadata(5)


def test_a_manifest_that_is_still_json_but_not_the_one_written_is_refused(three):
    path = three / "5" / "MANIFEST.json"
    text = path.read_bytes()
    for old, new in ((b'"step": 5', b'"step": 7'), (b'"crc32": "', b'"crc32": "0')):
        assert text.count(old) == 1
        path.write_bytes(text.replace(old, new))
        with pytest.raises(CheckpointError, match="5/MANIFEST.json"):
            Checkpoints(three).metadata(5)


def test_the_manifest_says_what_is_stored(three):
    found = json.loads((three / "5" / "MANIFEST.json").read_text())
    assert found["leaves"]["params/kernel"] == "float32[97,389]"
    assert found["leaves"]["rng"] == "uint32[2]"
    assert (found["metadata"], found["metric"]) == ({"step": 5}, -5.0)
    assert found["files"].keys() == storage.lengths(three / "5").keys() - {"MANIFEST.json"}
    for name, (length, crc) in found["files"].items():
        content = (three / "5" / name).read_bytes()
        assert [length, crc] == [len(content), zlib.crc32(content)]
