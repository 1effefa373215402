# %% [markdown]
# # Several processes
#
# Under `torchrun` every process passes its own shard of the data to `fit`, and all get the same posterior: that of all data. Nothing else
# changes. Here two processes on one machine do it, and the result is compared with a single process.

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
# An empty shard is fine. Processes with different weights or options are refused on every process, and where one process fails, all do.
