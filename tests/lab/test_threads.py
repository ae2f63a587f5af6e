import signal
import subprocess
import sys
import threading

import pytest
import torch

from fsdp_ema_lib.lab.threads import Worker, cpu_threads


def test_the_number_of_threads_is_put_back_also_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), cpu_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before


def test_no_thread_at_all_is_refused():
    with pytest.raises(ValueError, match="count must be at least 1 thread, got 0"), cpu_threads(0):
        pytest.fail("the block must not run")


def stepper(worker):
    """Steps until it is told to end; their number is what it returns."""
    steps = 0
    while worker.keep_going():
        steps += 1
        worker.stepped = steps
    return steps


@pytest.fixture
def make_worker():
    made = []

    def make(work=stepper, **settings):
        made.append(Worker(work, name="a test's work", **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.stop()
        if worker.state != "ready":
            worker.wait_for("stopped", "finished", "failed", timeout=60)


def test_work_is_done_in_another_thread_and_its_result_returned(make_worker):
    worker = make_worker(lambda worker: threading.get_ident())
    assert worker.state == "ready"
    worker.start()
    assert worker.result(timeout=60) != threading.get_ident()
    assert worker.state == "finished" and not worker.alive


def test_a_paused_worker_takes_no_step_until_it_resumes(make_worker):
    worker = make_worker()
    worker.start()
    worker.pause()
    worker.wait_for("paused", timeout=60)
    stood = getattr(worker, "stepped", 0)
    with pytest.raises(TimeoutError, match=r"a test's work: still paused after 0.05 s, not running or finished"):
        worker.wait_for("running", "finished", timeout=0.05)
    assert getattr(worker, "stepped", 0) == stood
    worker.resume()
    worker.wait_for("running", timeout=60)
    worker.stop()
    assert worker.result(timeout=60) >= stood
    assert worker.state == "stopped"


def test_a_paused_worker_can_be_stopped(make_worker):
    worker = make_worker()
    worker.start()
    worker.pause()
    worker.wait_for("paused", timeout=60)
    worker.stop()
    worker.result(timeout=60)
    worker.resume()  # too late for that, and no harm
    assert worker.state == "stopped"


def test_states_are_told_in_their_order(make_worker):
    states = []
    worker = make_worker(on_change=lambda: states.append(worker.state))
    worker.start()
    worker.pause()
    worker.wait_for("paused", timeout=60)
    worker.resume()
    worker.wait_for("running", timeout=60)
    worker.stop()
    worker.result(timeout=60)
    assert [state for state in states if state != "stopping"] == ["running", "paused", "running", "stopped"]


def test_what_the_work_raises_is_raised_to_who_asks(make_worker):
    worker = make_worker(lambda worker: 1 // 0)
    worker.start()
    worker.wait_for("failed", timeout=60)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            worker.result(timeout=60)
    assert isinstance(worker.error, ZeroDivisionError)


def test_a_worker_starts_once(make_worker):
    worker = make_worker()
    with pytest.raises(RuntimeError, match="a test's work: it was not started"):
        worker.result()
    worker.start()
    with pytest.raises(RuntimeError, match=r"it was started before \(now running\); make a new Worker"):
        worker.start()


def test_an_interrupt_ends_the_waiting_and_not_the_work(make_worker):
    main, waiting = threading.main_thread().ident, threading.Event()

    def interrupt_the_main_thread(worker):
        waiting.wait(60)
        signal.pthread_kill(main, signal.SIGINT)
        return stepper(worker)

    worker = make_worker(interrupt_the_main_thread)
    worker.start()
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        worker.result(timeout=60)
    assert worker.state == "running" and worker.alive
    worker.stop()
    worker.result(timeout=60)


END_OF_A_PROCESS = """
from fsdp_ema_lib.lab.threads import Worker

def endless(worker):
    while worker.keep_going():
        pass
    return print("ended in order", flush=True)

running, paused = (Worker(endless, name=name) for name in ("running", "paused"))
running.start()
paused.start()
paused.pause()
paused.wait_for("paused")
"""


def test_a_process_that_ends_stops_running_and_paused_work_between_two_steps():
    done = subprocess.run([sys.executable, "-c", END_OF_A_PROCESS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended in order\n" * 2, "")
