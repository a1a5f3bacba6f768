"""What the controller accepts as a generate's arguments, where it depends on more than one field."""

import pytest

from plexrl_controller.api.validation import check_spec
from plexrl_controller.domain.errors import InvalidArgument
from plexrl_controller.domain.states import CallKind
from tests.support import specs


@pytest.mark.parametrize("leave", [0, 1, 5])
def test_a_generate_may_leave_fewer_completions_than_it_has(leave: int) -> None:
    assert check_spec(specs.generate(n=3, leave=leave)) is CallKind.GENERATE


@pytest.mark.parametrize("leave", [6, 7, 2**32 - 1])
def test_one_that_may_leave_all_is_refused(leave: int) -> None:
    with pytest.raises(InvalidArgument, match=f"sampling.leave: {leave} of 6 completions; want fewer than there are"):
        check_spec(specs.generate(n=3, leave=leave))
