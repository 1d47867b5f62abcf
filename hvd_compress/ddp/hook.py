"""The function that DDP calls. It has no postponed annotations, since DDP inspects the real ones."""

import torch
import torch.distributed as dist

from hvd_compress.codecs.calls import expect_instance
from hvd_compress.ddp.compressor import Compressor


def hook(
    state: Compressor,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: ``model.register_comm_hook(compressor, hook)``.

    Args:
        state: the compressor.
        bucket: the gradients that DDP has collected.

    Returns:
        A future of the ranks' averages, in the bucket's own memory.

    Raises:
        TypeError: the state is not a compressor.
    """
    expect_instance("hook", state, Compressor, "model.register_comm_hook({}, hook)")
    return state.reduce(bucket)
