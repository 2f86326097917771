"""A head that FSDP2 shards over two ranks: gathered once, its gradient summed over the ranks once."""

import os
import subprocess
import sys

RANK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from kernels import GatheredHead, linear_logprob
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
full, hidden, target = torch.randn(51, 8), torch.randn(12, 8), torch.randint(51, (12,))
plain = full.clone().requires_grad_()
linear_logprob(hidden, plain, target)[0].sum().backward()
mesh = init_device_mesh("cpu", (2,))
mine = slice(0, 9) if rank == 0 else slice(9, 12)
once = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
head = GatheredHead(once)
for rows in (slice(mine.start, mine.start + 2), slice(mine.start + 2, mine.stop)):
    linear_logprob(hidden[rows], head.full, target[rows])[0].sum().backward()
head.reduce()
direct = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
linear_logprob(hidden[mine], direct, target[mine])[0].sum().backward()
for grad in (once.grad, direct.grad):
    assert grad.placements == (Shard(0),)
    torch.testing.assert_close(grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


def test_two_ranks_with_a_sharded_head_get_the_gradient_of_one(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env=environment, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()
