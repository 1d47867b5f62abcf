"""PyTorch's hook of PowerSGD (Vogels et al., 2019) in DDP, with counters.

Without postponed annotations: DDP looks at those of a hook as they are.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

from hvd_compress.ranks.counters import Counters

ONE_BUCKET = 2**20
"""MB. PowerSGD's hook waits for a collective in the thread that has ended another one. Gloo has two
threads: with two buckets, both of them wait for ever."""


class PowerSGD:
    """PyTorch's hook of PowerSGD (Vogels et al., 2019), and counters of what it sends.

    Args:
        rank: of the matrices that are sent for a layer's gradient.
        warmup_steps: before them; from 2 on. 1,000 by default, as PyTorch has it.
    """

    def __init__(self, rank: int = 1, warmup_steps: int = 1000) -> None:
        self._state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=warmup_steps
        )
        self.counters = Counters()

    def hook(
        self,
        state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook."""
        gradients = bucket.buffer()
        before = self._state.total_numel_after_compression
        future = power_sgd.powerSGD_hook(self._state, bucket)
        sent = self._state.total_numel_after_compression - before
        width = gradients.element_size()
        self.counters.uncompressed_bytes += gradients.numel() * width
        self.counters.add_allreduce(dist.get_world_size(), (sent or gradients.numel()) * width)
        return future

    def residual_norm(self) -> float:
        """The l2 norm of what has not been sent."""
        return math.hypot(*(float(error.norm()) for error in self._state.error_dict.values()))
