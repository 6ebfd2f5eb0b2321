import signal
import threading

import pytest

from orbit_jax.runs.interrupt import StopFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_first_signal_sets_the_flag_and_lets_the_step_end(number):
    with StopFlag() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested


def test_a_second_interrupt_stops_at_once():
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.requested


def test_earlier_handlers_come_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), StopFlag():
        1 / 0  # noqa: B018
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_off_the_main_thread_it_does_nothing():
    seen = []

    def work():
        with StopFlag() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
