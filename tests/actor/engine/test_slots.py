"""Which slot a sequence gets, and how much of it is computed already."""

import numpy as np

from actor.engine.slots import Placement, SlotTable


def keys(*parts):
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


def computed(table, stream, generation=0):
    """Places a stream, as if all of it were computed, and returns its placement."""
    placement = table.place(stream, generation)
    table.append(placement.slot, stream[placement.reused :])
    return placement


PROMPT = np.arange(100, 120)


def test_a_slot_with_states_is_continued_as_a_whole_and_no_part_of_it_is_reused():
    table = SlotTable(3, 64, only_whole=True)
    keys = np.arange(1, 41)
    first = table.place(keys, 0)
    table.append(first.slot, keys[:30])
    table.release(first.slot, answered=True)
    assert table.place(keys, 0) == Placement(first.slot, 30)
    table.release(first.slot, answered=True)
    other = np.concatenate([keys[:25], np.arange(100, 110)])
    assert table.place(other, 0).reused == 0  # of another slot, or of the beginning of this one


def test_the_next_turn_of_an_episode_continues_in_its_slot():
    table = SlotTable(4, 64)
    first = computed(table, PROMPT)
    table.release(first.slot)
    assert table.place(keys(PROMPT, [1, 2]), 0) == Placement(first.slot, len(PROMPT))


def test_the_last_key_is_always_computed_anew():
    table = SlotTable(2, 64)
    first = computed(table, PROMPT)
    table.release(first.slot)
    assert table.place(PROMPT, 0).reused == len(PROMPT) - 1


def test_a_shared_prompt_is_copied_from_a_busy_slot():
    table = SlotTable(3, 64)
    first = computed(table, keys(PROMPT, [1, 2, 3]))
    second = table.place(keys(PROMPT, [7]), 0)
    assert second.slot != first.slot and second == Placement(second.slot, len(PROMPT), donor=first.slot)
    assert table.keys[second.slot, : len(PROMPT)].tolist() == PROMPT.tolist()


def test_nothing_is_copied_from_what_older_weights_computed():
    table = SlotTable(3, 64)
    first = computed(table, keys(PROMPT, [1, 2, 3]), generation=0)
    assert table.place(keys(PROMPT, [7]), 1).reused == 0
    table.release(first.slot, answered=True)
    assert table.place(keys(PROMPT, [1, 2, 3, 4]), 1).reused == len(PROMPT) + 3  # its own episode goes on


def test_a_bare_prompt_of_older_weights_is_nobodys_beginning():
    table = SlotTable(1, 64)
    table.release(computed(table, PROMPT, generation=0).slot)
    assert table.place(keys(PROMPT, [1]), 1).reused == 0


def test_another_image_in_the_same_place_is_no_common_prefix():
    table = SlotTable(2, 64)
    first = computed(table, keys(PROMPT, [-5, -5], [1]))
    table.release(first.slot)
    assert table.place(keys(PROMPT, [-6, -6], [1]), 0).reused == len(PROMPT)


def test_the_least_recently_used_slot_is_given_up_first():
    table = SlotTable(2, 64)
    slots = [computed(table, np.arange(n, n + 5)).slot for n in (200, 300)]
    for slot in reversed(slots):
        table.release(slot)
    assert table.place(np.arange(400, 405), 0) == Placement(slots[1], 0)
    assert table.place(np.arange(500, 505), 0) == Placement(slots[0], 0)
    assert table.place(np.arange(600, 605), 0) is None


def test_flushing_forgets_idle_slots_now_and_busy_ones_when_they_end():
    table = SlotTable(2, 64)
    idle, busy = computed(table, PROMPT), computed(table, np.arange(300, 330))
    table.release(idle.slot)
    assert table.flush() == 1
    assert table.place(keys(PROMPT, [1]), 0).reused == 0
    table.release(busy.slot)
    assert table.lengths[busy.slot] == 0
