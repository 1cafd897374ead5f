"""The first signal is a request, the second one stops."""

import signal
import threading

import pytest

from mercer.train.interrupt import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_sets_a_flag_and_the_second_stops(number):
    before = signal.getsignal(number)
    with Interruption() as interruption:
        assert not interruption.requested
        signal.raise_signal(number)
        assert interruption.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_thread_may_train_too():
    seen = []

    def work():
        with Interruption() as interruption:
            seen.append(interruption.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
