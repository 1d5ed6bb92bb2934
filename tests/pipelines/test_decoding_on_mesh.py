"""Decoding on a mesh: the same texts, pieces compiled once, and no device has the whole cache."""

import json

import pytest

from tests.two_processes import finished, start

# The share of a cache that a device has.
HELD = {
    "tensor=4": 1 / 4,
    "data=2,tensor=2": 1 / 4,
    "data=4": 1 / 4,
    "sequence=4": 1 / 4,
    "fsdp=4": 1,
}


@pytest.mark.long
def test_texts_are_written_on_a_mesh_from_a_state_that_is_divided_from_the_beginning():
    (ended,) = finished(start("-m", "tests.pipelines.decoding_on_mesh", devices=4))
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert len(found) == 2 * len(HELD)
    for each in found:
        assert each["equal"], each
        # Settings of a call, such as its temperature, are no other program.
        pieces = {"search_more", "read_prompts", "enter_sentences"} & each["compiled"].keys()
        assert {each["compiled"][name] for name in pieces} == {1} and len(pieces) == 2, each
        assert {x for layers in each["held"] for x in layers} == {HELD[each["mesh"]]}
