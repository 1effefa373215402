"""Serve a posterior over HTTP: `POST /predict` with a list of inputs answers with probabilities and their uncertainty.

    pip install fastapi uvicorn
    python examples/serve.py --forever          # then: curl -d '{"inputs": [[0.1, 0.2, ...]]}' .../predict

The posterior covers all weights of a small network on scikit-learn's digits. It is distilled into a predictor that
costs about one forward pass, and that any number of threads may call at the same time. Without --forever the script
sends one request to its own server and ends.
"""

import json
import sys
import threading
import time
import urllib.request

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from sklearn.datasets import load_digits
from torch import nn

import lapwing


def train() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Train a small network on 1,400 digits."""
    torch.manual_seed(0)
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:1400]), y[:1400]).backward()
        optimizer.step()
    return model.eval(), x, y


def make_app(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> FastAPI:
    """Fit, tune and distill, and return the application that answers with the result."""
    la = lapwing.fit(model, (x[:1400], y[:1400]), "classification", structure="kron", progress=False)
    fast = la.tune((x[1400:1600], y[1400:1600])).distill(x[:400], epochs=20)
    print(fast.summary())
    app = FastAPI()

    @app.post("/predict")
    def predict(body: dict) -> dict:  # a plain function: FastAPI runs each request in a thread of its own
        try:
            p = fast.predict(torch.tensor(body["inputs"], dtype=torch.float32))
        except (lapwing.LapwingError, KeyError, TypeError, ValueError) as error:
            raise HTTPException(422, str(error)) from error
        return {"probs": p.probs.tolist(), "label": p.label.tolist(), "epistemic": p.epistemic.tolist()}

    return app


def main() -> None:
    model, x, y = train()
    server = uvicorn.Server(uvicorn.Config(make_app(model, x, y), "127.0.0.1", 0, log_level="warning"))
    if "--forever" in sys.argv:
        return server.run()
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    data = json.dumps({"inputs": x[1700:1702].tolist()}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/predict", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    server.should_exit = True
    thread.join()
    print({"label": found["label"], "truth": y[1700:1702].tolist(), "epistemic": found["epistemic"]})


if __name__ == "__main__":
    main()
