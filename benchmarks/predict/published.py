"""The performance models of the papers.

:mod:`hvd_compress.planner.cost` predicts the costs of this package's exchanges. The papers drew their
figures with the models in this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AppendixB:
    """TernGrad's model (Wen et al., 2017, appendix B), on which that of ECQ-SGD (section 6.3) is based.

    Whole gradients are summed along a tree: among a machine's GPUs, to its processor, and among machines.
    Nothing overlaps.

    Attributes:
        gpu_bandwidth: the bandwidth between two GPUs of a machine in bytes per second.
        cpu_bandwidth: the bandwidth between GPU and processor.
        network_bandwidth: the bandwidth between machines.
        network_latency: the seconds of latency of a message between machines.
    """

    gpu_bandwidth: float
    cpu_bandwidth: float
    network_bandwidth: float
    network_latency: float = 0.0

    def communication(self, machines: int, gpus: int, gradient_bytes: float) -> float:
        """The seconds of one exchange, T_comm.

        Args:
            machines: the number of machines.
            gpus: the number of GPUs in each machine.
            gradient_bytes: the size of the gradient as it is sent, the paper's :math:`|g|`.
        """
        within = gradient_bytes / self.gpu_bandwidth * math.log2(gpus)
        message = self.network_latency + gradient_bytes / self.network_bandwidth
        return within + gradient_bytes / self.cpu_bandwidth + message * math.log2(machines)

    def strong(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """The seconds of a step whose images are divided among all GPUs (strong scaling, equation 27).

        Args:
            machines: the number of machines.
            gpus: the number of GPUs in each machine.
            one: the seconds of the same step on one GPU, including the copy to its processor.
            gradient_bytes: the size of the gradient as it is sent.
        """
        computation = (one - gradient_bytes / self.cpu_bandwidth) / (machines * gpus)
        return computation + self.communication(machines, gpus, gradient_bytes)

    def weak(self, machines: int, gpus: int, one: float, gradient_bytes: float) -> float:
        """The seconds of a step in which each GPU has the images of a single one (weak, equation 29)."""
        computation = one - gradient_bytes / self.cpu_bandwidth
        return computation + self.communication(machines, gpus, gradient_bytes)


def pulled_bits(workers: int) -> float:
    """The bits per element of TernGrad's sum, which has 2N + 1 levels (Wen et al., 2017, section 3.1).

    Args:
        workers: N, the number of workers, whose ternary numbers have a common scale.
    """
    return math.log2(1 + 2 * workers)


@dataclass(frozen=True)
class OneBitCosts:
    """The costs by which 1-bit SGD chooses the number of nodes (Seide et al., 2014, section 2.1).

    Attributes:
        samples: the number of samples in a minibatch, N.
        per_sample: the seconds of one sample's gradient, T_calc^frm.
        post: the seconds of one post-processing step of all parameters, T_calc^post.
        post_steps: the number of post-processing steps, C.
        exchange: the seconds of an exchange of float32 numbers, T_comm^float.
        compression: the factor by which fewer bits are sent, Z.
        update: the seconds of adding the gradient to the model, T_calc^upd, on every node.
    """

    samples: int
    per_sample: float
    post: float
    post_steps: int
    exchange: float
    compression: float
    update: float

    def computation(self, nodes: float) -> float:
        """T_calc, the seconds that a node computes while half a minibatch is exchanged (section 2.2)."""
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        return shared / nodes + self.update

    def communication(self) -> float:
        """T_comm, the seconds of an exchange; in two shots, for any number of nodes (section 3.1)."""
        return self.exchange / self.compression

    def optimal_nodes(self) -> float:
        """The number of nodes for which exchange and computation take equally long (equation 4).

        Infinite if an exchange takes no longer than the update alone (section 2.3), so that the network is
        never the limit.
        """
        shared = self.samples / 2 * self.per_sample + self.post_steps * self.post
        hidden = self.communication() - self.update
        return shared / hidden if hidden > 0 else math.inf
