"""Checks that are collected and evaluated together."""

import torch

from featlearn.contraction.deferred_checks import DeferredChecks


def test_nothing_holds():
    assert DeferredChecks().hold()


def test_every_test_gets_its_own_numbers():
    """Of several types and shapes."""
    deferred, seen = DeferredChecks(), []
    given = [torch.tensor(1.0), torch.tensor([2.0, 3.0]), torch.tensor(4.0, dtype=torch.float64), torch.tensor([[5.0]])]
    deferred.expect(lambda *numbers: seen.append(numbers) or True, *given)
    deferred.expect(lambda *numbers: seen.append(numbers) or True, given[2], given[0])
    deferred.expect(lambda *numbers: seen.append(numbers) or True, torch.zeros(0), given[1])
    assert deferred.hold()
    assert seen == [(1.0, 2.0, 3.0, 4.0, 5.0), (4.0, 1.0), (2.0, 3.0)]


def test_one_failure_is_enough():
    for failing in range(3):
        deferred = DeferredChecks()
        for number in range(3):
            deferred.expect(lambda size, passes=number != failing: passes, torch.tensor(1.0))
        assert not deferred.hold()


def test_a_check_may_have_failed_already():
    deferred = DeferredChecks()
    deferred.expect(lambda size: True, torch.tensor(1.0))
    deferred.fail()
    assert not deferred.hold()


def test_sizes_are_those_of_the_largest_entries():
    deferred, seen = DeferredChecks(), []
    deferred.expect_sizes(lambda size: seen.append(size) or True, [torch.tensor([1.0, -3.0]), torch.tensor([[2.0]])])
    assert deferred.hold()
    assert seen == [3.0, 2.0]


def test_numbers_that_are_not_finite_reach_the_test():
    deferred = DeferredChecks()
    deferred.expect_sizes(lambda size: size < 10, [torch.tensor([1.0, torch.nan])])
    assert not deferred.hold()
