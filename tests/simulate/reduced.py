"""What makes each study of the simulator small: overrides, by the name of its experiment."""

_SHARED = ["workload.num_requests=60", "workload.num_prefixes=6", "workload.prefix_tokens=200"]
_SHORT = ["workload.suffix_tokens=40", "workload.output_tokens=8"]
REDUCED = {
    "paged_memory": [
        *("workload.num_requests=80", "workload.output_tokens.median=20", "workload.output_tokens.max=60"),
        *("simulation.capacity_tokens=2048", "simulation.max_model_len=1100", "simulation.block_sizes=[8,64]"),
        *("simulation.sharing_requests=5", "simulation.group_sizes=[2,4]"),
    ],
    "block_size": [*_SHARED, *_SHORT, "simulation.block_sizes=[8,64]", "simulation.capacity_tokens=[4096,16384]"],
    "radix_vs_blocks": [
        *("workload.num_conversations=6", "workload.turns=3", "workload.think_s=1.0"),
        *("workload.user_tokens=20", "workload.output_tokens=10", "simulation.capacity_shares=[0.6,1.0]"),
    ],
    "scheduling_order": [
        *(*_SHARED, *_SHORT, "max_num_seqs=2", "simulation.capacity_tokens=[640,4096]", "simulation.in_flight=[2,8]"),
    ],
    "static_vs_continuous": [
        *("workload.num_requests=24", "workload.suffix_tokens=100", "max_num_seqs=4", "simulation.rates_per_s=[1,200]"),
        *("workload.output_tokens.median=20", "workload.output_tokens.max=60"),
    ],
    "scheduler_policies": ["workload.num_requests=60", "load.speed=20", "max_num_seqs=8"],
    "chunked_prefill_simulated": [
        *("workload.num_requests=40", "workload.output_tokens=10", "load.rate=40"),
        *("workload.suffix_tokens.median=200", "workload.suffix_tokens.max=900", "simulation.token_budgets=[128,1024]"),
    ],
}
