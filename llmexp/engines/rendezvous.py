"""vLLM's own worker, which meets the others of its engine by a file.

Before 0.28 vLLM lets torch.distributed meet by a TCP store, which listens at every address of the machine. With
`--worker-cls llmexp.engines.rendezvous.worker` it meets as it does from 0.28 on. The environment variable
LLMEXP_RENDEZVOUS names the folder for that, of this launch alone. Needs nothing but vLLM there.
"""

import os
from typing import Any

VARIABLE = "LLMEXP_RENDEZVOUS"


def worker(**arguments: Any) -> Any:
    """The worker that vLLM itself would take."""
    from vllm.platforms import current_platform

    arguments["distributed_init_method"] = by_file(arguments["distributed_init_method"], os.environ[VARIABLE])
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker(**arguments)
    from vllm.v1.worker.gpu_worker import Worker

    return Worker(**arguments)


def by_file(init_method: str, folder: str) -> str:
    """`tcp://HOST:PORT`, in which all workers of an engine agree, as a file of that name."""
    return init_method.replace("tcp://", f"file://{folder}/", 1)
