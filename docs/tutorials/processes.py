# %% [markdown]
# # Fit on several processes
#
# Under `torchrun` every process passes its own shard of the data to `fit`, and all processes get the posterior of all data. Nothing else
# changes. This tutorial starts two processes on one machine, and compares the result with that of a single process.

# %%
import subprocess
import sys
import tempfile
from pathlib import Path

script = '''
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
import lapwing

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float64), torch.tensor(digits.target)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = slice(rank, 600, world)                                    # this process's shard
la = lapwing.fit(model, (x[mine], y[mine]), "classification", structure="kron", progress=False)
dist.destroy_process_group()
if rank == 0:
    alone = lapwing.fit(model, (x[:600], y[:600]), "classification", structure="kron", progress=False)
    print(f"{world} processes, {la.n_data:.0f} data")
    print(f"log evidence {float(la.log_evidence()):.6f}, in one process {float(alone.log_evidence()):.6f}")
'''

folder = Path(tempfile.mkdtemp())
(folder / "fit.py").write_text(script)
command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "fit.py")]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# A shard may be empty. If processes have different weights or options, or if one process fails, `fit` raises an error on every process.
