"""A posterior works in a forked process and after pickling, whatever its module and other threads hold."""

import multiprocessing
import pickle
import threading

import pytest
import torch
from torch import nn

import lapwing
from lapwing.model.forward import forward_mode

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 3


def test_a_posterior_over_a_compiled_module_is_pickled() -> None:
    module = nn.Sequential(nn.Linear(4, 3))
    module.compile(backend="eager")
    la = lapwing.fit(module, (X, Y), "classification", structure="diag")
    again = pickle.loads(pickle.dumps(la))
    torch.testing.assert_close(again.predict(X).probs, la.predict(X).probs)


def _take_a_turn() -> None:
    with forward_mode():
        pass


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
def test_a_fork_while_another_thread_uses_forward_mode() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with forward_mode():
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    child = multiprocessing.get_context("fork").Process(target=_take_a_turn)
    child.start()
    child.join(8)
    hung = child.is_alive()
    if hung:
        child.kill()
    done.set()
    thread.join()
    assert not hung
