from __future__ import annotations

import pytest

from insitu.returns import call_returns, returns_by_turn


def test_a_return_is_the_reward_and_what_followed() -> None:
    assert call_returns(1.0, [0.5, -1.0, 0.25], 3) == [0.75, 0.25, 1.25]
    assert call_returns(0.3, None, 2) == call_returns(0.3, [0.0, 0.0], 2) == [0.3, 0.3]
    assert call_returns(0.1, [0.2, 0.3], 2)[0] == call_returns(0.3, [0.1, 0.2], 2)[0], "rounded once"
    with pytest.raises(ValueError, match="1 call rewards for 2 calls"):
        call_returns(1.0, [0.5], 2)


def test_a_rollout_that_has_ended_earns_its_reward() -> None:
    returns = [call_returns(1.0, [0.5, -1.0, 0.25], 3), call_returns(0.5, [2.0], 1)]
    assert returns_by_turn(returns, [1.0, 0.5]) == [[0.75, 2.5], [0.25, 0.5], [1.25, 0.5]]
    assert returns_by_turn([], []) == []
