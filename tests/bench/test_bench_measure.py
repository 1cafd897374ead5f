"""Memory is exact on known allocations; time compares like with like and gives the threads back."""

import gc
import time

import pytest
import torch

from mercer.bench import Timing, one_thread, peak_bytes, steady_allocator, time_together
from mercer.bench.timing import call_seconds

MIB = 2**20


def block(mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MIB, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 7, 64, 300])
def test_a_known_allocation_is_measured_exactly(size):
    assert peak_bytes(lambda: block(size)) == size * MIB


def test_peak_counts_what_is_alive_together():
    def call():
        first = block(10)
        second = block(5)
        del first
        return second, block(8)

    assert peak_bytes(call) == 15 * MIB  # 10 + 5, then 5 + 8


def test_inputs_do_not_count_and_results_do():
    x = torch.zeros(MIB)  # 4 MiB
    assert peak_bytes(lambda: x) == 0
    assert peak_bytes(lambda: x + 1) == pytest.approx(4 * MIB, abs=64)  # and the 1 as a tensor
    assert peak_bytes(lambda: x.neg_()) == 0


def test_backward_is_counted():
    x = torch.zeros(MIB, requires_grad=True)
    upstream = torch.ones(MIB)
    # exp keeps its result (4 MiB) for the backward pass, which makes the gradient (4 MiB)
    assert peak_bytes(lambda: torch.autograd.grad(x.exp(), x, upstream)) == 8 * MIB


def test_allocations_inside_custom_operators_are_counted():
    class Wasteful(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + block(32)[0]

        @staticmethod
        def backward(ctx, *upstream):
            return upstream[0] + block(64)[0]

    x = torch.zeros(MIB, requires_grad=True)
    upstream = torch.ones(MIB)
    peak = peak_bytes(lambda: torch.autograd.grad(Wasteful.apply(x), x, upstream))
    assert peak == pytest.approx(72 * MIB, abs=64)  # output 4; in the backward pass 64 and the gradient 4


def test_older_garbage_is_not_taken_off():
    loop = [block(50)]
    loop.append(loop)  # only the garbage collector can release it
    del loop

    def call():
        kept = [block(10)]
        kept.extend([] for _ in range(100_000))  # enough objects to set the collector off
        return kept

    assert peak_bytes(call) == 10 * MIB
    assert gc.isenabled()


def test_memory_can_be_measured_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: block(2)) == 2 * MIB


def test_threads_are_given_back():
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == 2


def test_memory_is_measured_exactly_with_a_steady_allocator():
    with steady_allocator():
        assert peak_bytes(lambda: block(40)) == 40 * MIB
    assert peak_bytes(lambda: block(40)) == 40 * MIB


def test_waiting_takes_no_processor_time():
    assert call_seconds(lambda: time.sleep(0.2)) < 0.1


def test_ratio_of_equals_is_one_and_of_double_work_is_two():
    x = torch.randn(300, 300)

    def once():
        x @ x

    def twice():
        x @ x
        x @ x

    reference, *calls = time_together([once, once, twice], repeats=5)
    same, double = (Timing.of(seconds, reference) for seconds in calls)
    assert same.ratio == pytest.approx(1, abs=0.4)
    assert double.ratio == pytest.approx(2, abs=0.8)
    assert double.ratio_low <= double.ratio <= double.ratio_high
    assert double.seconds > double.reference_seconds > 0


def test_no_repeats_is_an_error():
    with pytest.raises(ValueError, match=r"repeats \(0\) must be at least 1"):
        time_together([int, int], repeats=0)
