"""A call of a wrapper stays in few files, and seldom comes back to one."""

import pytest

from benchmarks.stays import stays, ways


# Conversations are rendered, encoded and parsed besides: four files more.
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "files"), [("tokens", 8), ("text", 8), ("history", 12)])
def test_a_forward_stays_in_few_files(mode, files):
    """Scoring and generation pass few files of `tdfunc/llm`, in at most 8 folders, and come back at most 20 times."""
    for name, call in ways().items():
        if name.startswith(mode):
            call()
            found = stays(call)

            folders = {path.split("/")[0] for path in found}
            assert len({*found}) <= files, name
            assert len(found) - len({*found}) <= 20, name
            assert len(folders) <= 8, name
