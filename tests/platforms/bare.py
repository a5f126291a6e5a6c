"""Runs other tests without the calls that Windows lacks: `python -m pytest -p tests.platforms.bare tests/storage`.

Tests of those calls themselves are left out, each group with its reason. With `TDFUNC_EVERY_TEST=3` every third one of
the others runs.
"""

import fcntl
import os
import sys
from fnmatch import fnmatch

from tests.platforms.less import take_away

# The tests fork processes and lock files; tdfunc does neither.
take_away("bare", keep_fork=True)

import tdfunc  # noqa: E402, F401

sys.modules["fcntl"] = fcntl

LEFT_OUT = {
    "the test takes the same calls away, counts or disturbs them, or expects fsync of a folder": (
        "*test_deletion.py::*", "*::test_the_disk_has_the_contents_before_the_name_*", "*::test_nothing_goes_before_*",
        "*::test_ctrl_c_in_a_close_*", "*test_covers.py::test_a_narrow_table_*", "*::test_long_runs_are_not_mapped*",
        "*::test_a_file_of_several_machines_*", "*::test_a_file_without_space_is_not_mapped*",
        "*::test_gather_of_a_large_leaf*",
    ),
    "opening a pipe waits without O_NONBLOCK, and Windows has none in its folders": (
        "*::test_something_else_in_place_of_a_file*", "*::test_special_files*", "*::test_hostile_folders*",
    ),
    "without locks nothing removes what a killed save left": (
        "*::test_leftovers_*", "*::test_a_killed_process_discards_all_or_none*", "*test_kills.py::test_a_few_kills*",
        "*::test_a_few_reads_while_others_save*", "*::test_killed_between_the_two_steps*",
        "*::test_a_step_whose_writer_was_killed_between_two_renames*",
    ),
    "without locks saves to one place do not wait for each other": (
        "*::test_a_save_inside_a_save_*", "*::test_forks_*", "*::test_two_writers*",
        "*::test_a_temporary_name_that_is_deleted_before_it_is_locked*",
    ),
    "without locks a step can be removed while it is read": (
        "*test_manager.py::test_delete*", "*::test_a_step_that_is_read_is_not_removed*", "*::test_if_one_step_stays_*",
        "*::test_loads_meanwhile_are_whole*", "*::test_steps_that_another_process_discards_*",
        "*::test_a_step_that_is_replaced_before_it_is_locked*",
    ),
    "only Linux tells the path of an open file, and which pages of a map are changed": (
        "*::test_links_inside_the_folder_open*", "*::test_a_process_that_starts_gets_the_name_of_a_file*",
    ),
    "torch maps only a name that is UTF-8": ("*::test_paths_of_every_kind*",),
}  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """Leave out tests that do not apply, and all but a part of the others if the environment says so."""
    patterns = [pattern for group in LEFT_OUT.values() for pattern in group]
    apply = [item for item in items if not any(fnmatch(item.nodeid, pattern) for pattern in patterns)]
    kept = apply[:: int(os.environ.get("TDFUNC_EVERY_TEST", "1"))]
    gone = set(items) - set(kept)
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        items[:] = kept
