"""A server's day: threads with one request each at a time get the numbers that one thread gets, in flat memory."""

import gc
import importlib.util
import json
import sys
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import lapwing

THREADS, INPUTS = 8, 16
WAYS = ("predict of a last layer", "predictor of a last layer", "distilled predict", "distilled predictor")


class Meet(nn.Module):
    """Wait, while there is a barrier, until another thread is in the network too: a lock around requests would fail."""

    barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Meet.barrier is not None:
            Meet.barrier.wait(60)
        return x


def serving() -> tuple[dict[str, Callable[[Tensor], Tensor]], Tensor]:
    """Ways to answer a request, and requests of one input each."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), Meet(), nn.Linear(8, 3)
    )
    x, y = torch.randn(80, 1, 6, 6), torch.randint(3, (80,))
    options = {"structure": "kron", "prior": 10.0, "progress": False}
    last = lapwing.fit(model.eval(), (x, y), "classification", select="last_layer", **options)
    fast = lapwing.fit(model, (x, y), "classification", **options).distill(x, epochs=2)
    modules = last.predictor(), fast.predictor()
    found: dict[str, Callable[[Tensor], Tensor]] = {
        WAYS[0]: lambda one: last.predict(one).epistemic,
        WAYS[1]: lambda one: modules[0](one)["epistemic"],
        WAYS[2]: lambda one: fast.predict(one).epistemic,
        WAYS[3]: lambda one: modules[1](one)["epistemic"],
    }
    return found, x[:INPUTS]


def day(answer: Callable[[Tensor], Tensor], x: Tensor, expected: list[Tensor], seconds: float) -> int:
    """Let all threads ask as often as the time allows; return how often they did."""
    counts: list[int] = [0] * THREADS
    wrong: list[BaseException] = []
    gate, stop = threading.Barrier(THREADS), time.monotonic() + seconds

    def run(k: int) -> None:
        try:
            gate.wait()
            while time.monotonic() < stop or counts[k] < 3:
                i = (counts[k] + k) % len(x)
                torch.testing.assert_close(answer(x[i : i + 1]), expected[i], rtol=1e-5, atol=1e-6)
                counts[k] += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
    return sum(counts)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * 4096


def asked(seconds: float) -> dict[str, int]:
    ways, x = serving()
    done = {}
    for name in WAYS:
        expected = [ways[name](x[i : i + 1]) for i in range(len(x))]
        day(ways[name], x, expected, seconds / 8)  # caches fill
        gc.collect()
        tracemalloc.start()
        before, pages = tracemalloc.get_traced_memory()[0], resident()
        done[name] = day(ways[name], x, expected, seconds)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 2**18, f"{name}: {grown} bytes after {done[name]} requests"
        assert resident() - pages < 2**26, f"{name}: {resident() - pages} bytes of memory more"
    return done


def test_eight_threads_get_the_numbers_of_one() -> None:
    done = asked(0.5)
    assert all(count >= 3 * THREADS for count in done.values())


@pytest.mark.parametrize("name", WAYS)
def test_requests_are_in_the_network_at_the_same_time(name: str) -> None:
    ways, x = serving()
    expected = [ways[name](x[i : i + 1]) for i in range(2)]
    found: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: ways[name](x[i : i + 1])}), daemon=True) for i in range(2)
    ]
    Meet.barrier = threading.Barrier(2)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        Meet.barrier = None
    assert sorted(found) == [0, 1], "a thread waited for the other in vain"
    for i, value in enumerate(expected):
        torch.testing.assert_close(found[i], value)


@pytest.mark.slow
def test_a_day_of_requests() -> None:
    """Thousands of requests within a minute."""
    done = asked(15.0)
    assert sum(done.values()) > 2000, done


def example() -> ModuleType:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("sklearn")
    path = Path(__file__).parent.parent.parent / "examples" / "serve.py"
    spec = importlib.util.spec_from_file_location("serve", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_answers_on_loopback() -> None:
    """Several clients at once over real sockets, and a request that is refused."""
    serve = example()
    model, x, y = serve.train()
    server = serve.uvicorn.Server(serve.uvicorn.Config(serve.make_app(model, x, y), "127.0.0.1", 0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/predict"

        def post(content: object) -> dict:
            data = json.dumps(content).encode()
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)

        alone = [post({"inputs": x[i : i + 1].tolist()}) for i in range(8)]
        found: dict[int, dict] = {}
        clients = [
            threading.Thread(target=lambda i=i: found.update({i: post({"inputs": x[i : i + 1].tolist()})}))
            for i in range(8)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for i, one in enumerate(alone):
            torch.testing.assert_close(torch.tensor(found[i]["probs"]), torch.tensor(one["probs"]))
            assert abs(sum(one["probs"][0]) - 1) < 1e-5
        with pytest.raises(urllib.error.HTTPError, match="422"):
            post({"inputs": []})
        with pytest.raises(urllib.error.HTTPError, match="422"):
            post({"inputs": [[float("nan")] * 64]})
    finally:
        server.should_exit = True
        thread.join()
        sys.modules.pop("serve", None)
