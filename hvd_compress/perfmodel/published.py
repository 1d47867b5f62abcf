"""The performance models of the papers, as they are printed.

Our own (:mod:`~hvd_compress.perfmodel.cost`, :mod:`~hvd_compress.perfmodel.step`) says what this package's
exchanges cost. These say what the papers' figures were drawn with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AppendixB:
    """TernGrad's model (Wen et al., 2017, appendix B). ECQ-SGD, section 6.3, has one of the same origin.

    Gradients are added up along a tree, whole at each level: among a machine's GPUs, to its processor,
    among machines. Nothing overlaps.

    Attributes:
        gpu_bandwidth: between two GPUs of a machine, bytes a second.
        cpu_bandwidth: between GPU and processor.
        network_bandwidth: between machines.
        network_latency: seconds a message between machines.
    """

    gpu_bandwidth: float
    cpu_bandwidth: float
    network_bandwidth: float
    network_latency: float = 0.0

    def communication(self, machines: int, gpus: int, gradient_bytes: float) -> float:
        """Seconds of one exchange, T_comm.

        Args:
            machines: how many.
            gpus: of each machine.
            gradient_bytes: size of the gradient as it is sent, the paper's :math:`|g|`.
        """
        within = gradient_bytes / self.gpu_bandwidth * math.log2(gpus)
        message = self.network_latency + gradient_bytes / self.network_bandwidth
        return within + gradient_bytes / self.cpu_bandwidth + message * math.log2(machines)

    def strong(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """Seconds of a step whose images are spread over all GPUs, equation 27.

        Args:
            machines: how many.
            gpus: of each machine.
            one: seconds of the same step on one GPU, the copy to its processor included.
            gradient_bytes: size of the gradient as it is sent.
        """
        computation = (one - gradient_bytes / self.cpu_bandwidth) / (machines * gpus)
        return computation + self.communication(machines, gpus, gradient_bytes)

    def weak(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """Seconds of a step in which each GPU has as many images as the only one had, equation 29."""
        computation = one - gradient_bytes / self.cpu_bandwidth
        return computation + self.communication(machines, gpus, gradient_bytes)


@dataclass(frozen=True)
class OneBitCosts:
    """What 1-bit SGD's choice of the number of nodes depends on (Seide et al., 2014, section 2.1).

    Attributes:
        samples: of a minibatch, N.
        per_sample: seconds of one sample's gradient, T_calc^frm.
        post: seconds of one post-processing step of all parameters, T_calc^post.
        post_steps: how many there are, C.
        exchange: seconds of an exchange of float32 numbers, T_comm^float.
        compression: how many times fewer bits are sent, Z.
        update: seconds of adding the gradient to the model, T_calc^upd, on every node.
    """

    samples: int
    per_sample: float
    post: float
    post_steps: int
    exchange: float
    compression: float
    update: float

    def computation(self, nodes: float) -> float:
        """T_calc: what a node computes while half a minibatch is exchanged (section 2.2)."""
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        return shared / nodes + self.update

    def communication(self) -> float:
        """T_comm: of an exchange, which two shots make independent of the number of nodes (section 3.1)."""
        return self.exchange / self.compression

    def optimal_nodes(self) -> float:
        """Equation 4: so many nodes that an exchange takes as long as the computation beside it.

        Infinite where an exchange takes no longer than the update alone (section 2.3): then the network
        never limits.
        """
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        hidden = self.communication() - self.update
        return shared / hidden if hidden > 0 else math.inf


def balanced_workers(
    computation: Callable[[int], float], communication: Callable[[int], float], limit: int
) -> int:
    """Equation 3 of 1-bit SGD for costs that both depend on the number of workers.

    Up to there the network waits for the computation, and beyond, the computation for the network.

    Args:
        computation: seconds for a number of workers; falls with it.
        communication: seconds for a number of workers; does not fall.
        limit: the largest number that is considered.

    Returns:
        The largest number of workers up to ``limit`` with ``computation >= communication``; 1 where
        there is none.
    """
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if computation(middle) >= communication(middle):
            low = middle
        else:
            high = middle - 1
    return low
