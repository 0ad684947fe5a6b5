"""How fast this host's GPUs add up partial sums: `python benchmarks/all_reduce.py [GPUS] [HIDDEN_SIZE]`.

Times NCCL's all-reduce of the hidden states of 1 to 16,384 tokens in bfloat16, the messages that tensor
parallelism sends twice a layer, and prints time, algorithm bandwidth (bytes over time) and bus bandwidth (times
2 (n - 1) / n, what each link carried; as nccl-tests reports it). Give the last as gpu.link_bytes_per_s.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
WARM_UP, REPEATS = 20, 100


def measure(rank: int, gpus: int, hidden_size: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29477", rank=rank, world_size=gpus)
    if rank == 0:
        print(f"{gpus} x {torch.cuda.get_device_name()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        print(f"P2P between 0 and 1: {torch.cuda.can_device_access_peer(0, 1)}")
        print(f"{'tokens':>8} {'bytes':>12} {'us':>10} {'GB/s':>8} {'bus GB/s':>9}")
    for tokens in TOKENS:
        message = torch.zeros(tokens, hidden_size, dtype=torch.bfloat16, device="cuda")
        for _ in range(WARM_UP):
            dist.all_reduce(message)
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        for _ in range(REPEATS):
            dist.all_reduce(message)
        torch.cuda.synchronize()
        took_s = (time.perf_counter() - started) / REPEATS
        if rank == 0:
            size = message.numel() * message.element_size()
            bus = size / took_s * 2 * (gpus - 1) / gpus
            print(f"{tokens:>8} {size:>12,} {took_s * 1e6:>10.1f} {size / took_s / 1e9:>8.1f} {bus / 1e9:>9.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else torch.cuda.device_count()
    if not 2 <= wanted <= torch.cuda.device_count():
        sys.exit(f"all_reduce: needs 2 GPUs or more; {torch.cuda.device_count()} are visible")
    mp.spawn(measure, (wanted, int(sys.argv[2]) if len(sys.argv) > 2 else 3584), nprocs=wanted)
